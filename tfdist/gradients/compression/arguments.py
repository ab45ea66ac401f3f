"""Validation of the parameters of methods."""

from tfdist.errors import InputError
from tfdist.errors.number_checks import is_integer


def checked_integer(method: str, parameter: str, value: int, low: int, high: int, *, multiple: int = 1) -> int:
    """Returns an integer in [low, high] that is a multiple of `multiple`.

    Args:
      method: name of the method, for the error.
      parameter: name of the parameter, for the error.
      value: value to check.
      low: smallest value allowed.
      high: largest value allowed.
      multiple: what the value must be a multiple of.

    Raises:
      InputError: the value is something else.
    """
    if not is_integer(value) or not low <= value <= high or value % multiple:
        kind = f"a multiple of {multiple}" if multiple > 1 else "a whole number"
        raise InputError(
            f"{method} needs {parameter} to be {kind} from {low} to {high}. Received: {value!r}. "
            f"Write, say, {method}({parameter}={low})."
        )
    return int(value)


def checked_flag(method: str, parameter: str, value: bool) -> bool:
    """Returns a bool; raises `InputError` with the names of method and parameter for anything else."""
    if not isinstance(value, bool):
        raise InputError(
            f"{method} needs {parameter}=True or False. Received: {value!r}. Leave it out for the default."
        )
    return value
