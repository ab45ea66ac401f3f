"""The search for the batch size, for commands and for user programs (`find_batch_size`)."""

import contextlib
import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.config.search import BatchSizeSearch
from tfdist.errors import InputError, byte_size, error_summary, is_integer, is_number, names_arguments
from tfdist.launcher import spawn
from tfdist.launcher.job import Job
from tfdist.planning.trials import TRIAL_SECONDS, Trial, TrialProgram, Trials, available_bytes

_SPEED_FRACTION = 0.95  # the smallest size with this fraction of the highest speed counts as the fastest
_MAX_STEPS_PER_DOUBLING = 8  # sizes that are tried between a size and its double


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """The result of a search for the batch size.

    Attributes:
      trials: all trials, in ascending order of size.
      memory_bytes: memory limit.
      max_size: largest size that the search may try.
    """

    trials: list[Trial]
    memory_bytes: int
    max_size: int

    @property
    def usable_trials(self) -> list[Trial]:
        """Trials of usable sizes."""
        return [trial for trial in self.trials if not trial.failure]

    @property
    def largest(self) -> int | None:
        """The largest usable size; None if there is none."""
        return max((trial.batch_size for trial in self.usable_trials), default=None)

    @property
    def fastest(self) -> Trial | None:
        """The smallest size with 95% of the highest speed; None if no size is usable."""
        highest = max((trial.examples_per_second for trial in self.usable_trials), default=0.0)
        return next((t for t in self.usable_trials if t.examples_per_second >= _SPEED_FRACTION * highest), None)

    def to_json(self) -> dict[str, Any]:
        """Returns the result as JSON values."""
        return {
            "largest": self.largest,
            "fastest": self.fastest and self.fastest.batch_size,
            "memory_limit_bytes": self.memory_bytes,
            "trials": [trial._asdict() for trial in self.trials],
        }

    def describe(self) -> str:
        """Returns the result in a few sentences."""
        limit = byte_size(self.memory_bytes)
        if self.fastest is None:
            return f"No batch size fits. The smallest, {self.trials[0].batch_size}: {self.trials[0].failure}."
        if any(trial.failure for trial in self.trials):
            largest = f"Largest that fits into {limit}: {self.largest}."
        else:
            largest = (
                f"All sizes fit into {limit}; the largest size tried is {self.largest}, of at most {self.max_size}."
            )
        speed = f"{self.fastest.examples_per_second:.0f} examples/s"
        return f"{largest} Fastest: {self.fastest.batch_size}, with {speed}."


def search(
    run: Callable[[int], Trial],
    first: int,
    max_size: Callable[[], int],
    memory: int,
    on_trial: Callable[[Trial], object] = lambda trial: None,
) -> BatchSizes:
    """Tries batch sizes: doubles the first size while it fits and then refines it, or halves it until it fits.

    All larger sizes are multiples of the first, so they can be divided between the same replicas. `max_size` returns
    the largest size to try, after the first trial; `memory` is the limit of the trials in bytes, for the result.
    """
    trials: dict[int, Trial] = {}

    def fits(size: int) -> bool:
        trials[size] = run(size)
        on_trial(trials[size])
        return not trials[size].failure

    size, bound = first, None
    if fits(first):
        while bound is None and 2 * size <= max_size():
            if fits(2 * size):
                size *= 2
            else:
                bound = 2 * size
        unit = first * max(1, size // first // _MAX_STEPS_PER_DOUBLING)
        while bound is not None and bound - size > unit:
            middle = size + (bound - size) // (2 * unit) * unit
            if fits(middle):
                size = middle
            else:
                bound = middle
    else:
        with contextlib.suppress(InputError):  # a size may not be divisible between the devices
            while size > 1 and size % 2 == 0 and not fits(size // 2):
                size //= 2
    return BatchSizes([trials[tried_size] for tried_size in sorted(trials)], memory, max(max_size(), first))


@names_arguments
def find_batch_size(
    fn: Callable[..., float],
    batch_size: int = 64,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    max: int,
    memory: int | str = "",
    seconds: float = TRIAL_SECONDS,
    processes: int = 1,
    launcher: str = "tensorflow",
) -> BatchSizes:
    """Searches for the largest batch size that fits into memory, and for the fastest.

    Each size is tried in new processes, as by `tfdist.spawn`, which are terminated when they exceed the memory limit. This
    process's model, data and devices are not used. Sizes are doubled until one does not fit, and then refined.

    Args:
      fn: called as `fn(batch_size, *args, **kwargs)` in each process of a trial; trains some steps and returns the examples
        per second; the value of rank 0 is used. It is pickled as by `tfdist.spawn`.
      batch_size: the first size; all larger sizes are multiples of it. If it does not fit, it is halved.
      args: further positional arguments.
      kwargs: keyword arguments.
      max: the largest size to try.
      memory: total memory of the processes of a trial, as a number of bytes or a string such as "2GiB"; by default 90% of the
        available memory.
      seconds: a trial that takes longer is terminated, and its size counts as too large.
      processes: number of processes of a trial.
      launcher: how processes find each other: "tensorflow" (TF_CONFIG) or "horovod".

    Returns:
      The trials, the largest and the fastest size.

    Raises:
      InputError: an argument is invalid, or cannot be pickled.
      TrialError: a trial failed for a reason other than memory.
    """
    options = BatchSizeSearch(memory=memory, max=max, processes=processes, launcher=launcher)
    job = Job(processes=options.processes, launcher=options.launcher)
    if not is_integer(batch_size) or not 1 <= batch_size <= max:
        raise InputError(f"batch_size must be an integer from 1 to max. Received: {batch_size!r}, with max={max}.")

    def prepare(size: int, folder: pathlib.Path) -> TrialProgram:
        spawn.write_call(folder, fn, (size, *args), kwargs or {})
        return TrialProgram(spawn.call_command(folder), lambda: _speed(folder), lambda rank: _error(folder, rank))

    limit = options.memory_bytes or available_bytes()
    with Trials(prepare, job, memory=limit, seconds=seconds) as trials:
        return search(trials, int(batch_size), lambda: options.max, limit)


def _speed(folder: pathlib.Path) -> float:
    result = spawn.read_result(folder, 0)
    value = result.value if result else None
    if not is_number(value) or not math.isfinite(value) or value < 0:
        raise InputError(f"The function must return the examples per second. Received: {value!r} on rank 0.")
    return float(value)


def _error(folder: pathlib.Path, rank: int) -> str:
    result = spawn.read_result(folder, rank)
    return error_summary(result.error) if result and result.error else ""
