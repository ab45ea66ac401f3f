"""The terminal of a launcher, on which it shows the progress bar of rank 0 although that writes to a pipe."""

import os
from collections.abc import Mapping
from typing import Any, TextIO

VARIABLE = "TFDIST_TERMINAL_COLUMNS"  # columns for the bar; set for rank 0 if stderr of the launcher is a terminal


def columns(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of columns for a bar on the launcher's terminal; 0 if there is none."""
    text = environment.get(VARIABLE, "")
    return int(text) if text.isdecimal() else 0


def is_terminal(stream: Any) -> bool:
    """Returns whether a stream is a terminal; None, or an object of a program's own with `write` alone, is none."""
    return bool(getattr(stream, "isatty", bool)())


def columns_of(stream: TextIO) -> int:
    """Returns the number of columns for a bar on a stream; 0 if it is no terminal, or one without cursor control."""
    if not is_terminal(stream) or os.environ.get("TERM", "dumb") in ("", "dumb", "unknown"):
        return 0
    try:
        # Some terminals wrap as soon as the last column is written.
        return max(os.get_terminal_size(stream.fileno()).columns - 1, 0)
    except (OSError, ValueError):
        return 0
