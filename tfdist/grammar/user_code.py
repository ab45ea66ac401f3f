"""Calls functions that users name in flags, and reports their errors in one line with the location."""

import inspect
import traceback
from collections.abc import Callable
from typing import Any

from tfdist.errors import InputError, TfdistError
from tfdist.errors.engine_errors import is_engine_error, one_line, out_of_memory
from tfdist.grammar.spec import Spec, call


def call_own(flag: str, function: Callable[..., Any], spec: Spec, **offered: Any) -> Any:
    """Calls a user's function, or a Keras class, like `spec.call`.

    Args:
      flag: flag that names it, such as `--model`.
      function: the function that the spec names.
      spec: its arguments.
      **offered: see `spec.call`.

    Raises:
      InputError: the function raised an error; the message has the error and the line. Out-of-memory and engine errors
        pass through.
    """
    try:
        return call(function, spec, **offered)
    except Exception as error:
        if isinstance(error, TfdistError) or is_engine_error(error) or out_of_memory(error):
            raise
        raise InputError(
            f"{flag}={spec} must not fail. Received: {type(error).__name__}: {one_line(str(error)).rstrip('.')} "
            f"({_place(function, error)}). Fix the function or its arguments."
        ) from error


def _place(function: Callable[..., Any], error: BaseException) -> str:
    """Returns the last line of the function's own file in the traceback, or else the last line of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    try:
        own = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # a builtin, or a callable object
        own = None
    frame = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1])
    return f"{frame.filename}, line {frame.lineno}"
