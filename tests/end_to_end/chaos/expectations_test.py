"""What is expected of an interrupted run: its exit codes, what counts as a difference, and its phases."""

import pathlib
import signal

import numpy as np
import pytest

from tests.end_to_end.chaos.campaign import Attempt, unexpected
from tests.end_to_end.chaos.ending import Ending, differences
from tests.end_to_end.chaos.settings import END, MISSED, START, STEP, STEPS, WRITE, Interruption
from tests.end_to_end.chaos.striking import Watch
from tfdist.reporting import RunDirectory
from tfdist.reporting.ledger_file import LedgerFile

TERM, KILL = signal.SIGTERM, signal.SIGKILL


@pytest.mark.parametrize(
    ("number", "fell", "codes", "wrong"),
    [
        *((TERM, fell, [75, 75], []) for fell in (START, STEP, WRITE, END)),
        *((TERM, fell, [0, 0], []) for fell in (STEP, WRITE)),
        *((TERM, fell, codes, [0, 1]) for fell in (STEP, WRITE) for codes in ([-15, 5], [5, -15], [143, 1])),
        *((TERM, fell, [75, code], [1]) for fell in (STEP, WRITE) for code in (0, 5, -15, 143)),
        *((TERM, fell, [143], [0]) for fell in (STEP, WRITE)),  # the launcher's exit code
        *((TERM, fell, codes, []) for fell in (START, END) for codes in ([-15, 5], [143], [0, -15])),
        *((KILL, fell, codes, []) for fell in (START, STEP, WRITE, END) for codes in ([-9, 5], [137], [0, -9])),
        (KILL, STEP, [75, -15], [0, 1]),
        (KILL, STEP, [1, -9], [0]),
        (TERM, MISSED, [0, 75], [1]),
        (KILL, MISSED, [5, 0], [0]),
        (None, "", [0, 0], []),
        (None, "", [5, 75], [0, 1]),
    ],
)
def test_codes(number: signal.Signals | None, fell: str, codes: list[int], wrong: list[int]) -> None:
    blow = Interruption(0, number, STEP, 0.5) if number else None
    found = unexpected(Attempt(fell, codes, 1.0, ""), blow)
    assert found == [f"process {rank} ended with {codes[rank]}" for rank in wrong]


def test_whatever_is_not_the_same_is_named() -> None:
    one = Ending({"model/a": "0f", "optimizer/a": "1e"}, {"begun_at": 0}, [{"kind": "train", "loss": 0.5}], "")
    assert not differences(one, one)
    loss = float(np.nextafter(0.5, 1))
    other = Ending({"model/a": "00"}, {"begun_at": 7}, [{"kind": "train", "loss": loss}], "Not proved: 1 problem")
    found = differences(other, one)
    assert [text.partition(":")[0] for text in (found[0], found[1], found[2], found[4])] == [
        "tensor model/a",
        "tensor optimizer/a",
        "value begun_at",
        "Not proved",
    ]
    assert found[3].startswith("record") and str(loss) in found[3]
    assert differences(one._replace(records=[]), one) == ["0 records, not 1"]


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
