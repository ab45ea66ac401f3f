"""What a seed decides: who is struck, how, and when."""

import random
import signal
from typing import NamedTuple

START, STEP, WRITE, END, MISSED = "start", "step", "write", "end", "missed"
_FIRST = (WRITE, STEP, START, STEP, WRITE)  # by the seed's number, so that few seeds have each of them


class Interruption(NamedTuple):
    """One blow.

    Attributes:
      rank: of the victim.
      signal: SIGKILL, or SIGTERM as a scheduler sends it.
      phase: to hit, START, STEP or WRITE; where it really falls is observed.
      moment: in [0, 1): of the time to the first step, or of the steps that are left.
    """

    rank: int
    signal: signal.Signals
    phase: str
    moment: float


class Plan(NamedTuple):
    """What befalls one run.

    Attributes:
      launched: whether `tfdist.launch` starts the ranks and watches over them; else nobody does.
      interruptions: one for each start of the run but the last.
      commits: whether the run makes commits, too, from which it may go on.
    """

    launched: bool
    interruptions: list[Interruption]
    commits: bool


def plan(name: str, seed: int, processes: int) -> Plan:
    """The plan of a seed for a strategy, the same on every machine."""
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
