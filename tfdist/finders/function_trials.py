"""`find_batch_size`: the search for the batch size of a program of your own."""

import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.errors import InputError, names_arguments
from tfdist.errors.engine_errors import described
from tfdist.errors.number_checks import is_integer, is_number
from tfdist.finders.batch_size import BatchSizes, search
from tfdist.finders.memory_limit import available_bytes
from tfdist.finders.trials import SECONDS, Prepared, Trials
from tfdist.grammar.search import BatchSizeSearch
from tfdist.launcher import pickled_call, spawn_entry
from tfdist.launcher.job import Job


@names_arguments
def find_batch_size(
    fn: Callable[..., float],
    batch_size: int = 64,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    max: int,
    memory: int | str = "",
    seconds: float = SECONDS,
    processes: int = 1,
    launcher: str = "tensorflow",
) -> BatchSizes:
    """Searches for the largest batch size that fits into memory, and for the fastest.

    Each size is tried in new processes, as by `tfdist.spawn`, which are ended when they have more memory than the limit.
    This process's model, data and devices are not used. Sizes are doubled until one does not fit, and then refined.

    Args:
      fn: called as `fn(batch_size, *args, **kwargs)` in each process of a trial; trains some steps, and returns the
        examples per second, of which rank 0's count. It is pickled as by `tfdist.spawn`.
      batch_size: the first size, of which all larger ones are multiples; if it does not fit, it is halved.
      args: further positional arguments.
      kwargs: keyword arguments.
      max: the largest size to try.
      memory: bytes that the processes of a trial may have together, as a number or such as "2GiB"; by default 90% of what
        is available.
      seconds: a trial that takes longer is ended, and its size counts as too large.
      processes: number of processes of a trial.
      launcher: how they find each other: "tensorflow" (TF_CONFIG) or "horovod".

    Returns:
      The trials, the largest and the fastest size.

    Raises:
      InputError: an argument is invalid, or cannot be pickled.
      TrialError: a trial failed for another reason than memory.
    """
    asked = BatchSizeSearch(memory=memory, max=max, processes=processes, launcher=launcher)
    job = Job(processes=asked.processes, launcher=asked.launcher)
    if not is_integer(batch_size) or not 1 <= batch_size <= max:
        raise InputError(f"batch_size must be an integer from 1 to max. Received: {batch_size!r}, with max={max}.")

    def prepare(size: int, folder: pathlib.Path) -> Prepared:
        pickled_call.write_call(folder, fn, (size, *args), kwargs or {})
        return Prepared(
            spawn_entry.command(folder),
            lambda: _speed(folder),
            lambda rank: _error(folder, rank),
        )

    limit = asked.memory_bytes or available_bytes()
    with Trials(prepare, job, memory=limit, seconds=seconds) as trials:
        return search(trials, int(batch_size), lambda: asked.max, limit)


def _speed(folder: pathlib.Path) -> float:
    result = pickled_call.read_result(folder, 0)
    value = result.value if result else None
    if not is_number(value) or not math.isfinite(value) or value < 0:
        raise InputError(f"The function must return the examples per second. Received: {value!r} in rank 0.")
    return float(value)


def _error(folder: pathlib.Path, rank: int) -> str:
    result = pickled_call.read_result(folder, rank)
    return described(result.error) if result and result.error else ""
