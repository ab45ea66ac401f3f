"""The search for the batch size: which sizes are tried, and what follows from the trials."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from tfdist.errors import InputError
from tfdist.errors.byte_sizes import byte_size
from tfdist.finders.trials import Trial

_AS_FAST = 0.95  # a size with this part of the highest speed counts as the fastest if it is the smallest such size
_FINEST = 8  # sizes between a power of two and the next


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """The result of a search for the batch size.

    Attributes:
      trials: the trials, ascending by size.
      memory_bytes: memory limit.
      most: largest size that could have been tried.
    """

    trials: list[Trial]
    memory_bytes: int
    most: int

    @property
    def usable(self) -> list[Trial]:
        """The trials of sizes that can be used."""
        return [trial for trial in self.trials if not trial.failure]

    @property
    def largest(self) -> int | None:
        """The largest size that can be used; None if there is none."""
        return max((trial.batch_size for trial in self.usable), default=None)

    @property
    def fastest(self) -> Trial | None:
        """The smallest size with 95% of the highest speed; None if none can be used."""
        highest = max((trial.examples_per_second for trial in self.usable), default=0.0)
        return next((t for t in self.usable if t.examples_per_second >= _AS_FAST * highest), None)

    def __repr__(self) -> str:
        fastest = self.fastest and self.fastest.batch_size
        return f"<BatchSizes: largest {self.largest}, fastest {fastest}, {len(self.trials)} trials>"

    def to_json(self) -> dict[str, Any]:
        """Returns what was found as values of JSON."""
        return {
            "largest": self.largest,
            "fastest": self.fastest and self.fastest.batch_size,
            "memory_limit_bytes": self.memory_bytes,
            "trials": [trial._asdict() for trial in self.trials],
        }

    def describe(self) -> str:
        """Returns what was found, in a few sentences."""
        limit = byte_size(self.memory_bytes)
        if self.fastest is None:
            return f"No batch size fits: even {self.trials[0].batch_size} needs {self.trials[0].failure}."
        if any(trial.failure for trial in self.trials):
            largest = f"Largest that fits into {limit}: {self.largest}."
        else:
            largest = (
                f"All sizes fit into {limit}; the largest that was tried is {self.largest}, of at most {self.most}."
            )
        speed = f"{self.fastest.examples_per_second:.0f} examples/s"
        return f"{largest} Fastest: {self.fastest.batch_size}, with {speed}."


def search(
    run: Callable[[int], Trial],
    first: int,
    most: Callable[[], int],
    memory: int,
    on_trial: Callable[[Trial], object] = lambda trial: None,
) -> BatchSizes:
    """Tries batch sizes: doubles the first while it fits, then refines; or halves it until it fits.

    All larger sizes are multiples of the first, so that replicas which can share it equally can share them.

    Args:
      run: tries a size.
      first: the first size.
      most: returns the largest size to try; called after the first trial.
      memory: memory limit of the trials in bytes, for the result.
      on_trial: called with each trial.
    """
    trials: dict[int, Trial] = {}

    def fits(size: int) -> bool:
        trials[size] = run(size)
        on_trial(trials[size])
        return not trials[size].failure

    size, bound = first, None
    if fits(first):
        while bound is None and 2 * size <= most():
            if fits(2 * size):
                size *= 2
            else:
                bound = 2 * size
        unit = first * max(1, size // first // _FINEST)
        while bound is not None and bound - size > unit:
            middle = size + (bound - size) // (2 * unit) * unit
            if fits(middle):
                size = middle
            else:
                bound = middle
    else:
        with contextlib.suppress(InputError):  # of a size that the devices cannot share
            while size > 1 and size % 2 == 0 and not fits(size // 2):
                size //= 2
    return BatchSizes([trials[tried] for tried in sorted(trials)], memory, max(most(), first))
