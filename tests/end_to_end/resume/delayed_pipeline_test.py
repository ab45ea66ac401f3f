"""A pipeline without a flush resumes bit for bit: batches that have begun are not saved, but computed again."""

import pathlib

import pytest

from tests import processes
from tests.end_to_end.resume.command_test import shown, weights
from tests.end_to_end.resume.pipeline_process_test import command, finished_without_a_stage, preempted
from tfdist import ledger

pytestmark = pytest.mark.processes

FLAGS = (
    "--strategy=pipeline",
    "--pipeline_schedule=pipedream",
    "--model=tests.end_to_end.chaos.network:network",  # local BatchNorm, and dropout
    "--dataset=digits",
    "--batch_size=48",
    "--log_every=20",
    "--measure_every=0",
    "--steps=200",
)
PARTS = (*FLAGS, "--steps_per_call=4", "--eval_every=40", "--checkpoint_every=50")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A run that is never saved or evaluated before its end."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    flags = (*FLAGS, "--steps_per_call=10", "--eval_every=1000", "--checkpoint_every=200")
    processes.finish(command(path, flags=flags))
    return path


def check_is_whole(path: pathlib.Path, whole: pathlib.Path) -> None:
    """Asserts that weights, their older versions, slots, statistics and records are equal, bit for bit."""
    assert any(name.startswith("delayed/") or "/delayed/" in name for name in weights(whole))
    assert weights(path) == weights(whole)
    assert [x for x in shown(path) if x[0] == "train"] == [x for x in shown(whole) if x[0] == "train"]
    assert ledger.main(str(path)) == 0


def test_a_preempted_run_ends_as_one_that_is_never_saved_or_evaluated(
    whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    parts = tmp_path / "parts"
    preempted(command(parts, flags=PARTS), 60)
    processes.finish(command(parts, flags=PARTS))
    check_is_whole(parts, whole)


@pytest.mark.full
def test_so_does_one_that_loses_a_stage_and_is_restarted(whole: pathlib.Path, tmp_path: pathlib.Path) -> None:
    parts = tmp_path / "parts"
    finished_without_a_stage(command(parts, "--max_restarts=1", flags=PARTS))
    check_is_whole(parts, whole)
