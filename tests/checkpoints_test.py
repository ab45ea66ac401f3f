"""The command that lists a run's checkpoints, valid and damaged."""

import re
import shutil

import numpy as np
import pytest

from tests import documented_json
from tests.checkpoint.damaging import flip_last
from tfdist import checkpoints
from tfdist.checkpoint.format import Checkpoint, TensorBlock, write_checkpoint
from tfdist.coordination import LocalGroup
from tfdist.errors import InputError


@pytest.fixture
def run(tmp_path):
    for step in (5, 10, 15):
        flags = {"strategy": "mirrored"}
        parts = [TensorBlock.full("model/w", np.full(1000, step, np.float32)), TensorBlock.full("model/b", np.zeros(3))]
        write_checkpoint(
            LocalGroup(), tmp_path / "checkpoints", parts, step=step, seed=0, flags=flags, values={}, keep=9
        )
    return tmp_path


@pytest.mark.smoke("checkpoints")
def test_all_are_good(run, capsys):
    assert checkpoints.main(str(run)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:20] for line in lines] == [f"step-{step:09d}  good" for step in (15, 10, 5)]
    assert re.fullmatch(
        r"step-000000015  good  20\d\d-\d\d-\d\d \d\d:\d\d:\d\d  [\d.]+ (bytes|KiB)  2 tensors  by mirrored", lines[0]
    )


def test_one_that_is_damaged_is_named_with_what_is_wrong(run, capsys):
    flip_last(run / "checkpoints" / "step-000000010" / "shard-00000.safetensors")
    (run / "checkpoints" / "step-000000005" / "manifest.json").unlink()
    assert checkpoints.main(str(run)) == 1
    first, second, why, third, missing = capsys.readouterr().out.splitlines()
    assert " good " in first and " bad " in second and third == "step-000000005  bad"
    assert why == "  shard-00000.safetensors: the hash of model/w does not match"
    assert missing == "  manifest.json: it is missing"


def test_json_says_what_the_text_says(run, capsys):
    (run / "checkpoints" / "step-000000005" / "manifest.json").unlink()
    record = documented_json.printed("checkpoints", checkpoints.main, str(run), code=1)
    assert not capsys.readouterr().out
    assert checkpoints.main(str(run)) == 1
    first, second, third, why = capsys.readouterr().out.splitlines()
    for line, one in zip((first, second, third), record["checkpoints"], strict=True):
        assert line.startswith(f"{one['name']}  {'good' if one['good'] else 'bad'}")
    *_, damaged = record["checkpoints"]
    assert why.strip() == damaged["problem"] and damaged["bytes"] is None
    newest = record["checkpoints"][0]
    assert (newest["step"], newest["tensors"], newest["strategy"]) == (15, 2, "mirrored")
    folder = run / "checkpoints" / newest["name"]
    assert newest["bytes"] == sum(file.stat().st_size for file in folder.iterdir())


def test_one_that_the_run_removes_meanwhile_is_not_bad(run, capsys, monkeypatch):
    verify = Checkpoint.verify

    def removed(checkpoint):
        if checkpoint.step == 5:
            shutil.rmtree(checkpoint.path)
        verify(checkpoint)

    monkeypatch.setattr(Checkpoint, "verify", removed)
    assert checkpoints.main(str(run)) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_where_there_is_none(tmp_path):
    with pytest.raises(InputError, match="must be that of a run with checkpoints, or of a checkpoint. Received: .*"):
        checkpoints.main(str(tmp_path / "checkpoints/step-000000099"))
