"""A function call that travels to new processes, and its results on their way back: files of one job's own.

They are pickles, which can run code when they are read: they lie in a directory that only this user can enter.
"""

import importlib.util
import pathlib
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tfdist.errors import InputError

# Without cloudpickle, functions of a notebook or of the script itself do not travel.
pickler: Any = importlib.import_module("cloudpickle") if importlib.util.find_spec("cloudpickle") else pickle


class Result(NamedTuple):
    """What became of a call: its value, or the exception and its traceback's text."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


def write_call(directory: pathlib.Path, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Writes the call that all ranks make.

    Raises:
      InputError: the function or an argument cannot be pickled.
    """
    try:
        data = pickler.dumps((fn, tuple(args), dict(kwargs)))
        if pickler is pickle:
            _check_home(fn)
    except Exception as error:  # __reduce__ methods raise what they like
        raise InputError(
            f"spawn must be able to pickle the function and its arguments. Received: {error!r}. {_remedy()}"
        ) from error
    (directory / "call.pickle").write_bytes(data)


def make_call(directory: pathlib.Path, rank: int) -> Result:
    """Makes the call in a new process, and writes what became of it."""
    try:
        fn, args, kwargs = pickle.loads((directory / "call.pickle").read_bytes())
        result = Result(fn(*args, **kwargs))
        data = pickler.dumps(result)
    except Exception as error:
        result = Result(error=error, trace=traceback.format_exc())
        data = _dump_error(result)
    path = _result_path(directory, rank)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(data)
    unfinished.rename(path)
    return result


def read_result(directory: pathlib.Path, rank: int) -> Result | None:
    """Returns what became of a rank's call, or None if its process ended before."""
    path = _result_path(directory, rank)
    return pickle.loads(path.read_bytes()) if path.exists() else None


def _result_path(directory: pathlib.Path, rank: int) -> pathlib.Path:
    return directory / f"result-{rank}.pickle"


def _dump_error(result: Result) -> bytes:
    try:
        data = pickler.dumps(result)
        pickle.loads(data)  # an exception whose constructor takes other arguments pickles, and does not come back
        return data
    except Exception:
        return pickler.dumps(result._replace(error=RuntimeError(f"{type(result.error).__name__}: {result.error}")))


def _check_home(fn: Callable[..., Any]) -> None:
    if getattr(fn, "__module__", None) == "__main__":
        raise pickle.PicklingError(f"{fn!r} belongs to __main__, which a new process does not have")


def _remedy() -> str:
    if pickler is pickle:
        return "Install cloudpickle, or put the function into a module that can be imported."
    return "What holds open files, threads or TensorFlow objects does not travel: create it inside the function."
