"""Measures the time of training steps, and compares ranks."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter


class StepTimer:
    """Measures calls of the compiled loop between two training records.

        with timer.call(steps=10):
            result = loop(...)
        timer.add_inner_times(wait_seconds=..., busy_seconds=...)
        record |= timer.window()

    Time between calls (evaluation, callbacks) is not included.
    """

    def __init__(self, batch_size: int, clock: Callable[[], float] = perf_counter):
        self._batch_size = batch_size
        self._clock = clock
        self._reset()

    @contextlib.contextmanager
    def call(self, steps: int) -> Iterator[None]:
        """Measures a call of the compiled loop with `steps` steps; its result must be complete when the context exits."""
        start_time = self._clock()
        yield
        self._seconds += self._clock() - start_time
        self._steps += steps

    def add_inner_times(self, wait_seconds: float, busy_seconds: float) -> None:
        """Adds times inside a call: waiting for input, and computing this process's own gradients."""
        self._wait_seconds += wait_seconds
        self._busy_seconds += busy_seconds

    @property
    def own_seconds(self) -> float | None:
        """Seconds per step of this process without collectives: input and gradients.

        None before the first call, and if devices have no clock, such as TPUs, because the time for input alone would be
        misleading.
        """
        return (self._wait_seconds + self._busy_seconds) / self._steps if self._busy_seconds else None

    def fields(self) -> dict[str, float]:
        """Returns `step_seconds`, `data_wait_seconds` and `examples_per_second` of the window; empty without calls."""
        if not self._steps:
            return {}
        fields = {"step_seconds": self._seconds / self._steps, "data_wait_seconds": self._wait_seconds / self._steps}
        if self._seconds > 0:
            fields["examples_per_second"] = self._batch_size * self._steps / self._seconds
        return fields

    def window(self) -> dict[str, float]:
        """Returns `fields()` and starts the next window."""
        fields = self.fields()
        self._reset()
        return fields

    def _reset(self) -> None:
        self._steps, self._seconds, self._wait_seconds, self._busy_seconds = 0, 0.0, 0.0, 0.0


def cost_of_slowest(own_seconds: Sequence[float | None], step_seconds: float) -> float | None:
    """Returns the fraction of a step for which the other ranks wait for the slowest; None if it is unknown."""
    times = [seconds for seconds in own_seconds if seconds is not None]
    if len(times) < 2 or len(times) < len(own_seconds) or step_seconds <= 0:
        return None
    *other_times, slowest = sorted(times)
    return min((slowest - median(other_times)) / step_seconds, 1.0)


def compare_ranks(own_seconds: Sequence[float | None]) -> dict[str, float | int]:
    """Returns the fields of a training record that compare ranks.

    Ranks are compared by their times without collectives, `StepTimer.own_seconds`: synchronous ranks wait for one another
    inside a step, so a slow rank affects the `step_seconds` of all. Empty if no rank has a time.
    """
    times = {rank: seconds for rank, seconds in enumerate(own_seconds) if seconds is not None}
    if not times:
        return {}
    slowest = max(times, key=lambda rank: times[rank])
    return {"step_seconds_min": min(times.values()), "step_seconds_max": times[slowest], "slowest_rank": slowest}
