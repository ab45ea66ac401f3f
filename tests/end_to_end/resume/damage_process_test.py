"""Real processes resume a run whose newest checkpoints have damaged shards of a rank other than 0."""

import pathlib
import shutil

import pytest

from tests.checkpoint.damaging import flip_last
from tests.end_to_end.resume.command_test import shown, weights
from tests.end_to_end.resume.commits_process_test import finish, train
from tfdist import ledger
from tfdist.checkpoint.format import Checkpoint
from tfdist.reporting import RunDirectory

pytestmark = pytest.mark.processes

STEPS, EVERY = 20, 5
FLAGS = ("--keep=3", "--steps_per_call=5", "--log_every=5")
SHARD = "shard-00001.safetensors"  # rank 1's


def of_rank_1(checkpoint: pathlib.Path) -> set[str]:
    """Returns the prefixes of the names of tensors that only rank 1 holds and reads."""
    saved = Checkpoint.open(checkpoint).tensors
    return {name.partition("/")[0] for name, tensor in saved.items() if SHARD in {part.file for part in tensor.parts}}


def test_both_ranks_take_the_last_good_one(tmp_path: pathlib.Path) -> None:
    """One is truncated, which every rank sees; in the one before, a byte is flipped that only rank 1 needs."""
    whole, path = tmp_path / "whole", tmp_path / "run"
    finish(train(whole, STEPS, EVERY, *FLAGS), 2)
    shutil.copytree(whole, path)
    (path / "model.keras").unlink()  # as if killed after its last checkpoint
    good, flipped, cut = (path / "checkpoints" / f"step-{step:09d}" for step in (10, 15, 20))
    assert of_rank_1(flipped) == {"statistics", "replica_state"}
    flip_last(flipped / SHARD)
    with open(cut / SHARD, "r+b") as file:
        file.truncate(100)

    said = finish(train(path, STEPS, EVERY, *FLAGS), 2)
    for damaged, why in ((cut, "it has 100 bytes instead of "), (flipped, " does not match")):
        [line] = [line for line in said[0].splitlines() if f"{damaged}/{SHARD}: " in line]
        assert why in line
        assert f"It was renamed to {damaged}.damaged." in line
        assert damaged.with_name(f"{damaged.name}.damaged").is_dir()
    for rank in range(2):
        assert f"Resuming from {good}." in RunDirectory(path).log(rank).read_text()
    assert weights(path) == weights(whole)
    assert shown(path) == shown(whole)
    assert ledger.main(str(path)) == 0
