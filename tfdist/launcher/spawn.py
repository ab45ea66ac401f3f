"""Runs a function in new processes that train together, from a notebook or a script."""

import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfdist.errors import ExitCode, InputError, SpawnError, exceptions
from tfdist.launcher import job_runner, pickled_call
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.supervision import deadline


def spawn(
    fn: Callable[..., Any],
    processes: int = 2,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    launcher: str = "tensorflow",
    timeout: float | None = None,
    log_dir: str = "",
) -> list[Any]:
    """Calls a function in new processes, and returns its return values, ordered by rank.

    The processes are new interpreters with the environment of `tfdist launch`, so that `tfdist.load_strategy("auto")` works in
    them. Their output is printed with the rank as a prefix. If a process fails, all of them are ended; none outlives this
    process.

    Functions of an importable module are pickled by name. Functions of a notebook or the main script are pickled by value,
    which requires cloudpickle.

    Args:
      fn: the function; it and its arguments are pickled.
      processes: number of processes, at least 1.
      args: positional arguments, the same in every process.
      kwargs: keyword arguments, the same in every process.
      launcher: how the processes find each other: "tensorflow" (TF_CONFIG) or "horovod".
      timeout: seconds for the whole call; None for no limit.
      log_dir: directory for the output of each rank, rank-N.log; empty for no logs.

    Returns:
      The return values, ordered by rank.

    Raises:
      InputError: an argument is invalid or cannot be pickled.
      TimeoutError: the call took longer than `timeout`.
      SpawnError: a process ended without an exception, because it was killed or called `sys.exit`.
      Exception: the exception of the process that failed first, with a note of its rank and traceback.
    """
    if not callable(fn):
        raise InputError(f"spawn calls a function in each process. Received: {fn!r:.60}. Give the function itself.")
    job = Job(processes=processes, launcher=launcher, log_dir=log_dir)
    with tempfile.TemporaryDirectory(prefix="tfdist-spawn-") as path:
        directory = pathlib.Path(path)
        pickled_call.write_call(directory, fn, args, kwargs or {})
        if not log_dir:
            job = dataclasses.replace(job, log_dir=path)
        outcome = job_runner.run(
            job,
            pickled_call.command(directory),
            os.environ,
            stops=[deadline(timeout)] if timeout is not None else [],
        )
        results = [pickled_call.read_result(directory, rank) for rank in range(processes)]
    _raise_failure(outcome, results)
    for rank, result in enumerate(results):
        if result is None:
            code = exceptions.describe(ExitCode.DONE)
            raise SpawnError(f"spawn: rank {rank} ended with {code} before its function returned.", rank, ExitCode.DONE)
    return [result.value for result in results if result]


def _raise_failure(outcome: Outcome, results: Sequence[pickled_call.CallResult | None]) -> None:
    if not outcome.code:
        return
    result = results[outcome.rank] if outcome.rank is not None else None
    if result and result.error:
        result.error.add_note(f"This was raised in the process of rank {outcome.rank}:\n{result.trace}")
        raise result.error
    if outcome.rank is None and outcome.code == ExitCode.STALLED:
        raise TimeoutError(f"spawn: {outcome.reason}.")
    raise SpawnError(f"spawn: {outcome.reason}.", outcome.rank, outcome.code)
