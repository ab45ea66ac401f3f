"""Runs a function in new processes that train together, from a notebook or a script."""

import json
import os
import pathlib
import pickle
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]  # pickles functions of a notebook or the main script, too

from tfdist.errors import ExitCode, InputError, SpawnError, TfdistError, describe_code, out_of_memory
from tfdist.launcher import job_runner
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.supervision import deadline


class CallResult(NamedTuple):
    """The result of a call.

    Attributes:
      value: the return value.
      error: the exception that the call raised, or None.
      trace: text of its traceback.
    """

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


def write_call(directory: pathlib.Path, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Writes the call for all ranks.

    Raises:
      InputError: the function or an argument cannot be pickled.
    """
    try:
        data = cloudpickle.dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:  # __reduce__ methods may raise anything
        raise InputError(
            f"spawn must be able to pickle the function and its arguments. Received: {error!r}. Objects that hold open "
            "files, threads or TensorFlow objects cannot be pickled: create them inside the function."
        ) from error
    (directory / "call.pickle").write_bytes(data)


def make_call(directory: pathlib.Path, rank: int) -> CallResult:
    """Calls the function in a new process, and writes the result."""
    try:
        fn, args, kwargs = pickle.loads((directory / "call.pickle").read_bytes())
        result = CallResult(fn(*args, **kwargs))
        data = cloudpickle.dumps(result)
    except Exception as error:
        result = CallResult(error=error, trace=traceback.format_exc())
        data = _dump_error(result)
    path = _result_path(directory, rank)
    partial_path = path.with_suffix(".unfinished")
    partial_path.write_bytes(data)
    partial_path.rename(path)
    return result


def read_result(directory: pathlib.Path, rank: int) -> CallResult | None:
    """Returns the result of a rank's call, or None if its process ended without one."""
    path = _result_path(directory, rank)
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _result_path(directory: pathlib.Path, rank: int) -> pathlib.Path:
    return directory / f"result-{rank}.pickle"


def _dump_error(result: CallResult) -> bytes:
    try:
        data = cloudpickle.dumps(result)
        pickle.loads(data)  # an exception whose constructor takes other arguments can be pickled but not unpickled
        return data
    except Exception:
        return cloudpickle.dumps(result._replace(error=RuntimeError(f"{type(result.error).__name__}: {result.error}")))


# Sets the parent's search path before importing tfdist; `-m` would need it in the environment.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tfdist.launcher import spawn; sys.exit(spawn.run_call(sys.argv[2], int(sys.argv[3])))"
)


def call_command(directory: pathlib.Path) -> Callable[[int], list[str]]:
    """Returns a function that maps a rank to the command that makes the call stored in a directory."""
    search_path = json.dumps([os.path.abspath(entry) for entry in sys.path])
    return lambda rank: [sys.executable, "-c", _BOOTSTRAP, search_path, str(directory), str(rank)]


def run_call(directory: str, rank: int) -> int:
    """Makes the call stored in a directory, writes its result there, and returns the exit code."""
    sys.argv = [sys.argv[0]]
    error = make_call(pathlib.Path(directory), rank).error
    if isinstance(error, TfdistError):
        return error.exit_code
    if error and out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY
    return ExitCode.FAILED if error else ExitCode.DONE


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

    The processes are new interpreters with the environment of `tfdist launch`, where `tfdist.load_strategy("auto")` works.
    Their output is printed with the rank as a prefix. If one fails, all are terminated. No process outlives this one.

    Functions of an importable module are pickled by name. Functions of a notebook or the main script are pickled by value.

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
        raise InputError(f"spawn calls a function in each process. Received: {fn!r:.60}. Pass the function itself.")
    with tempfile.TemporaryDirectory(prefix="tfdist-spawn-") as path:
        job = Job(processes=processes, launcher=launcher, log_dir=log_dir or path)
        directory = pathlib.Path(path)
        write_call(directory, fn, args, kwargs or {})
        stops = [deadline(timeout)] if timeout is not None else []
        outcome = job_runner.run(job, call_command(directory), os.environ, stops=stops)
        results = [read_result(directory, rank) for rank in range(processes)]
    _raise_failure(outcome, results)
    for rank, result in enumerate(results):
        if result is None:
            code = describe_code(ExitCode.DONE)
            raise SpawnError(f"spawn: rank {rank} ended with {code} before its function returned.", rank, ExitCode.DONE)
    return [result.value for result in results if result]


def _raise_failure(outcome: Outcome, results: Sequence[CallResult | None]) -> None:
    if not outcome.code:
        return
    result = results[outcome.rank] if outcome.rank is not None else None
    if result and result.error:
        result.error.add_note(f"This was raised in the process of rank {outcome.rank}:\n{result.trace}")
        raise result.error
    if outcome.rank is None and outcome.code == ExitCode.STALLED:
        raise TimeoutError(f"spawn: {outcome.reason}.")
    raise SpawnError(f"spawn: {outcome.reason}.", outcome.rank, outcome.code)
