"""The exit codes that are expected, by signal and phase of the interruption."""

import signal

import pytest

from tests.end_to_end.chaos.attempt import Attempt, unexpected
from tests.end_to_end.chaos.plan import END, MISSED, START, STEP, WRITE, Interruption

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
