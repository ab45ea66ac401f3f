"""Checks of what methods are given."""

from tfdist.errors import InputError


def checked_whole(method: str, parameter: str, value: int, low: int, high: int, *, multiple: int = 1) -> int:
    """Returns a whole number in [low, high] that is a multiple; `method` and `parameter` name it in the error."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high or value % multiple:
        kind = f"a multiple of {multiple}" if multiple > 1 else "a whole number"
        raise InputError(
            f"{method} needs {parameter} to be {kind} from {low} to {high}. Received: {value!r}. "
            f"Write, say, {method}({parameter}={low})."
        )
    return value


def checked_flag(method: str, parameter: str, value: bool) -> bool:
    """Returns a value that is True or False; `method` and `parameter` name it in the error."""
    if not isinstance(value, bool):
        raise InputError(
            f"{method} needs {parameter}=True or False. Received: {value!r}. Leave it out for the default."
        )
    return value
