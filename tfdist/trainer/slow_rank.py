"""Finds a rank for which the others wait, from the times of several records."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from tfdist.reporting.timing import cost_of_slowest

_RATIO = 1.25  # of the slowest rank's time to that of the others
_COST = 0.1  # fraction of a step
_RECORDS, _STEPS = 5, 50  # for which the same rank has to be slow
_SECONDS = 10.0  # and this long, too: on a busy machine, a process is slow for a second or two at a time


class _Slow(NamedTuple):
    """What a record says about the slowest rank."""

    step: int
    step_seconds: float
    rank: int
    ratio: float
    cost: float


class SlowRank:
    """Names a rank that is slow for several records in a row, so that noise is not reported."""

    def __init__(self) -> None:
        """Initializes without records."""
        self._found: list[_Slow] = []

    def observe(self, own_seconds: Sequence[float | None], step_seconds: float, step: int) -> str | None:
        """Returns a warning if the slowest rank of this record and of those before it is the same, else None.

        Args:
          own_seconds: seconds per step of each rank for its input and gradients; None for ranks without a clock.
          step_seconds: wall time of a step.
          step: updates done so far.
        """
        found = _slowest(own_seconds, step_seconds, step)
        if found is None:
            self._found = []
            return None
        self._found = [*(one for one in self._found if one.rank == found.rank), found]
        if not self._is_persistent():
            return None
        ratio, cost = median(one.ratio for one in self._found), median(one.cost for one in self._found)
        return (
            f"Rank {found.rank} takes {ratio:.1f} times as long as the others for its input and gradients, and they wait for "
            f"it during {100 * cost:.0f}% of each step. --balance=measured allocates it fewer rows."
        )

    def _is_persistent(self) -> bool:
        steps = self._found[-1].step - self._found[0].step
        seconds = steps * median(one.step_seconds for one in self._found)
        return len(self._found) >= _RECORDS and steps >= _STEPS and seconds >= _SECONDS


def _slowest(own_seconds: Sequence[float | None], step_seconds: float, step: int) -> _Slow | None:
    cost = cost_of_slowest(own_seconds, step_seconds)
    if cost is None or cost < _COST:
        return None
    seconds = [each or 0.0 for each in own_seconds]
    rank = seconds.index(max(seconds))
    ratio = seconds[rank] / max(median(seconds[:rank] + seconds[rank + 1 :]), 1e-9)
    return _Slow(step, step_seconds, rank, ratio, cost) if ratio >= _RATIO else None
