"""A run directory written by an earlier version (4fbe9f5, before packages and `TrainState`): read, and resumed."""

import pathlib
import shutil

import numpy as np
import pytest
from absl import flags as absl_flags

from tfdist import ledger, train
from tfdist.checkpoint.format import Checkpoint, newest
from tfdist.cli import command, flags

pytestmark = pytest.mark.tensorflow  # imported when a command runs

EARLIER = pathlib.Path(__file__).parent / "earlier_version"
TOLERANCE = 1e-5  # bitwise equal on one kind of processor, but the files may come from another


@pytest.fixture
def directory(tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(EARLIER, tmp_path / "run"))


def parsed(*argv: str):
    values = absl_flags.FlagValues()
    flags.define(values)
    command.parse(values, ["train", *argv], "tfdist.train", "")
    return flags.config(values)


def test_its_run_is_resumed_by_its_flag_file(directory, capsys):
    """Two logical replicas with error feedback end with the same weights, slots and errors as in the earlier version."""
    given = parsed(f"--flagfile={directory / 'flags.txt'}", f"--output_dir={directory}", "--steps=12")
    assert train.main(given) == 0
    last = Checkpoint.open(newest(directory / "checkpoints")[0])
    assert last.step == 12
    expected = Checkpoint.open(EARLIER / "uninterrupted" / "step-000000012")
    assert list(last.tensors) == list(expected.tensors)
    for name in last.tensors:
        found, wanted = (saved.read(name).astype("float64") for saved in (last, expected))
        assert np.linalg.norm(found - wanted) <= TOLERANCE * np.linalg.norm(wanted), name
    assert ledger.main(str(directory)) == 0
    assert "Proved: 12 steps" in capsys.readouterr().out


def test_its_checkpoint_begins_another_run(directory, tmp_path, caplog):
    given = parsed(
        f"--flagfile={directory / 'flags.txt'}",
        f"--output_dir={tmp_path / 'new'}",
        f"--resume={directory}",
        "--strategy=single",
        "--devices=0",
        "--steps=9",
    )
    assert train.main(given) == 0
    assert Checkpoint.open(newest(tmp_path / "new" / "checkpoints")[0]).step == 9
    assert "step-000000008" in caplog.text and "1 replicas resume a run of 2" in caplog.text
