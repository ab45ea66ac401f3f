"""The plan of a seed: which rank is interrupted, how, and when."""

import random
import signal
from typing import NamedTuple

START, STEP, WRITE, END, MISSED = "start", "step", "write", "end", "missed"
_FIRST = (WRITE, STEP, START, STEP, WRITE)  # by seed, so that a few consecutive seeds have all of them


class Interruption(NamedTuple):
    """One interruption.

    Attributes:
      rank: rank that gets the signal.
      signal: SIGKILL, or SIGTERM as sent by a scheduler.
      phase: intended phase, START, STEP or WRITE; the actual one is observed.
      moment: fraction, in [0, 1), of the time to the first step, or of the remaining steps.
    """

    rank: int
    signal: signal.Signals
    phase: str
    moment: float


class Plan(NamedTuple):
    """The plan of one run.

    Attributes:
      launched: whether `tfdist launch` starts and supervises the ranks; otherwise they are not supervised.
      interruptions: one for each start of the run except the last.
      commits: whether the run also makes in-memory checkpoints.
    """

    launched: bool
    interruptions: list[Interruption]
    commits: bool


def plan(name: str, seed: int, processes: int) -> Plan:
    """Returns the plan of a seed for a strategy, the same on every machine."""
    drawn = random.Random(f"{name} {seed}")
    count = drawn.choice((1, 2))
    phases = [_FIRST[seed % len(_FIRST)], drawn.choice(_FIRST)][:count]
    return Plan(
        drawn.random() < 0.5,
        [
            Interruption(
                rank=drawn.randrange(processes),
                signal=drawn.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)),
                phase=phase,
                moment=drawn.random(),
            )
            for phase in phases
        ],
        drawn.random() < 0.5,
    )
