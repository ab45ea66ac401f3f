"""Measures the time of a training window."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter


class StepTimer:
    """Measures compiled calls between two training records.

        with timer.call(steps=10):
            result = loop(...)
        timer.inside(waited=..., busy=...)
        record |= timer.window()

    Time outside of calls (evaluation, callbacks) is not counted.

    Args:
      batch_size: number of examples in a global batch.
      clock: monotonic clock in seconds.
    """

    def __init__(self, batch_size: int, clock: Callable[[], float] = perf_counter):
        self._batch_size = batch_size
        self._clock = clock
        self._reset()

    @contextlib.contextmanager
    def call(self, steps: int) -> Iterator[None]:
        """Measures a compiled call of `steps` steps; its result must be complete when the context exits."""
        began = self._clock()
        yield
        self._seconds += self._clock() - began
        self._steps += steps

    def inside(self, waited: float, busy: float) -> None:
        """Adds times that a call measured internally.

        Args:
          waited: seconds spent waiting for input.
          busy: seconds of computation until this process had its own gradients.
        """
        self._waited += waited
        self._busy += busy

    @property
    def own_seconds(self) -> float | None:
        """Seconds per step of this process without collectives: input and gradients.

        None before any call, and if the devices have no clock, as on TPUs, because the time for input alone would be
        misleading.
        """
        return (self._waited + self._busy) / self._steps if self._busy else None

    def fields(self) -> dict[str, float]:
        """Returns the window's fields of a training record on this rank.

        Returns:
          `step_seconds`, `data_wait_seconds` and `examples_per_second`; empty if no call was measured.
        """
        if not self._steps:
            return {}
        fields = {"step_seconds": self._seconds / self._steps, "data_wait_seconds": self._waited / self._steps}
        if self._seconds > 0:
            fields["examples_per_second"] = self._batch_size * self._steps / self._seconds
        return fields

    def window(self) -> dict[str, float]:
        """Returns `fields()` and starts the next window."""
        fields = self.fields()
        self._reset()
        return fields

    def _reset(self) -> None:
        self._steps, self._seconds, self._waited, self._busy = 0, 0.0, 0.0, 0.0


def cost_of_slowest(own_seconds: Sequence[float | None], step_seconds: float) -> float | None:
    """Returns the fraction of a step for which the other ranks wait for the slowest; None if they are not comparable.

    Args:
      own_seconds: see `over_ranks`.
      step_seconds: wall time of a step.
    """
    known = [seconds for seconds in own_seconds if seconds is not None]
    if len(known) < 2 or len(known) < len(own_seconds) or step_seconds <= 0:
        return None
    *others, slowest = sorted(known)
    return min((slowest - median(others)) / step_seconds, 1.0)


def over_ranks(own_seconds: Sequence[float | None]) -> dict[str, float | int]:
    """Returns the fields of a training record that compare ranks.

    Synchronous ranks wait for one another inside a step, so that a slow one affects the `step_seconds` of all. Ranks
    are therefore compared by their times without collectives.

    Args:
      own_seconds: `StepTimer.own_seconds` of each rank, by rank; None for ranks without one.

    Returns:
      `step_seconds_min`, `step_seconds_max` and `slowest_rank`; empty if no rank has a time.
    """
    times = {rank: seconds for rank, seconds in enumerate(own_seconds) if seconds is not None}
    if not times:
        return {}
    slowest = max(times, key=lambda rank: times[rank])
    return {"step_seconds_min": min(times.values()), "step_seconds_max": times[slowest], "slowest_rank": slowest}
