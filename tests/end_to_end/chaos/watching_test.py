"""The phase of a run, determined from the contents of its directory."""

import pathlib

import numpy as np

from tests.end_to_end.chaos.plan import END, START, STEP, WRITE
from tests.end_to_end.chaos.settings import STEPS
from tests.end_to_end.chaos.watching import Watch
from tfdist.reporting import RunDirectory
from tfdist.reporting.ledger_file import LedgerFile


def test_a_run_goes_through_its_phases(tmp_path: pathlib.Path) -> None:
    watch, directory = Watch(tmp_path), RunDirectory(tmp_path)
    assert watch.phase() == START
    assert watch.saved == 0
    ledger = LedgerFile(directory.ledger(0, 1))
    assert watch.phase() == START
    ledger.write(0, 1, np.arange(4))
    ledger.close()
    assert watch.phase() == STEP
    partial = directory.checkpoints / f".step-{STEPS:09d}.partial"
    partial.mkdir(parents=True)
    assert watch.phase() == WRITE
    partial.rename(directory.checkpoints / f"step-{STEPS:09d}")
    assert watch.phase() == END
    assert watch.saved == STEPS
    (directory.checkpoints / ".step-000000007.pruned").mkdir()
    assert watch.phase() == END


def test_what_a_former_start_has_left_does_not_count(tmp_path: pathlib.Path) -> None:
    directory = RunDirectory(tmp_path)
    ledger = LedgerFile(directory.ledger(0, 0))
    ledger.write(0, 1, np.arange(4))
    ledger.close()
    (directory.checkpoints / ".step-000000007.partial").mkdir(parents=True)
    directory.starts.write_text("{}\n")
    assert Watch(tmp_path).phase() == START
