"""Where the time of a training window goes."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter


class StepTimer:
    """Measures compiled calls between one training record and the next.

        with timer.call(steps=10):
            result = loop(...)
        timer.inside(waited=..., busy=...)
        record |= timer.window()

    What happens outside of calls (an evaluation, a callback) does not count.

    Args:
      batch_size: examples in one global batch.
      clock: seconds since any point; increases.
    """

    def __init__(self, batch_size: int, clock: Callable[[], float] = perf_counter):
        self._batch_size = batch_size
        self._clock = clock
        self._reset()

    @contextlib.contextmanager
    def call(self, steps: int) -> Iterator[None]:
        """Measures a compiled call of `steps` steps; the result must have been waited for when it ends."""
        began = self._clock()
        yield
        self._seconds += self._clock() - began
        self._steps += steps

    def inside(self, waited: float, busy: float) -> None:
        """Adds what a call measured inside itself.

        Args:
          waited: seconds that it waited for its input.
          busy: seconds that this process computed, until it had its own gradients.
        """
        self._waited += waited
        self._busy += busy

    @property
    def own_seconds(self) -> float | None:
        """Seconds a step of this process alone, without the collectives: input and gradients.

        None before any call, and where the devices have no clock, as a TPU's: the input's part alone would mislead.
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
        """Returns `fields()` and begins the next window."""
        fields = self.fields()
        self._reset()
        return fields

    def _reset(self) -> None:
        self._steps, self._seconds, self._waited, self._busy = 0, 0.0, 0.0, 0.0


def over_ranks(own_seconds: Sequence[float | None]) -> dict[str, float | int]:
    """Returns the fields of a training record that compare the ranks.

    Ranks that train in step wait for one another inside a step, so a slow one shows in everybody's `step_seconds`. What
    tells ranks apart is the time that each needs without the collectives.

    Args:
      own_seconds: each rank's `StepTimer.own_seconds`, by rank; None from a rank that has none.

    Returns:
      `step_seconds_min`, `step_seconds_max` and `slowest_rank`; empty if no rank has a time.
    """
    known = {rank: seconds for rank, seconds in enumerate(own_seconds) if seconds is not None}
    if not known:
        return {}
    slowest = max(known, key=lambda rank: known[rank])
    return {"step_seconds_min": min(known.values()), "step_seconds_max": known[slowest], "slowest_rank": slowest}
