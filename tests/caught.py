"""Errors as texts, for processes that report them to a test."""

from collections.abc import Callable


def error_of(call: Callable[[], object]) -> str:
    """Returns the class and the message of the error that a call raises; empty if it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
