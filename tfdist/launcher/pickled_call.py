"""Passes a function call to new processes, and its results back, as pickle files.

Unpickling can execute code, so the files are in a directory that only this user can access.
"""

import importlib.util
import json
import os
import pathlib
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tfdist.errors import ExitCode, InputError, TfdistError
from tfdist.errors.engine_errors import out_of_memory

# The standard library's pickle cannot serialize functions of a notebook or the main script.
pickler: Any = importlib.import_module("cloudpickle") if importlib.util.find_spec("cloudpickle") else pickle


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
        data = pickler.dumps((fn, tuple(args), dict(kwargs)))
        if pickler is pickle:
            _check_importable(fn)
    except Exception as error:  # __reduce__ methods may raise anything
        raise InputError(
            f"spawn must be able to pickle the function and its arguments. Received: {error!r}. {_remedy()}"
        ) from error
    (directory / "call.pickle").write_bytes(data)


def make_call(directory: pathlib.Path, rank: int) -> CallResult:
    """Makes the call in a new process, and writes its result."""
    try:
        fn, args, kwargs = pickle.loads((directory / "call.pickle").read_bytes())
        result = CallResult(fn(*args, **kwargs))
        data = pickler.dumps(result)
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
        data = pickler.dumps(result)
        pickle.loads(data)  # an exception whose constructor takes other arguments can be pickled but not unpickled
        return data
    except Exception:
        return pickler.dumps(result._replace(error=RuntimeError(f"{type(result.error).__name__}: {result.error}")))


def _check_importable(fn: Callable[..., Any]) -> None:
    if getattr(fn, "__module__", None) == "__main__":
        raise pickle.PicklingError(f"{fn!r} belongs to __main__, which a new process does not have")


def _remedy() -> str:
    if pickler is pickle:
        return "Install cloudpickle, or put the function into a module that can be imported."
    return (
        "Objects that hold open files, threads or TensorFlow objects cannot be pickled: create them inside the "
        "function."
    )


# Sets the parent's search path before importing tfdist; `-m` would need it in the environment.
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from tfdist.launcher import pickled_call; sys.exit(pickled_call.main(sys.argv[2], int(sys.argv[3])))"
)


def command(directory: pathlib.Path) -> Callable[[int], list[str]]:
    """Returns a function that maps a rank to the command that makes the call stored in a directory."""
    search_path = json.dumps([os.path.abspath(entry) for entry in sys.path])
    return lambda rank: [sys.executable, "-c", _BOOTSTRAP, search_path, str(directory), str(rank)]


def main(directory: str, rank: int) -> int:
    """Makes the call stored in a directory, writes its result there, and returns the exit code."""
    sys.argv = [sys.argv[0]]
    error = make_call(pathlib.Path(directory), rank).error
    if isinstance(error, TfdistError):
        return error.exit_code
    if error and out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY
    return ExitCode.FAILED if error else ExitCode.DONE
