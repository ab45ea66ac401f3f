"""Terminals on which text can be overwritten: that of a stream, and that of a launcher, to which rank 0 writes by a pipe."""

import os
import stat
from collections.abc import Mapping
from typing import Any, TextIO

LAUNCHER_VARIABLE = (
    "TFDIST_TERMINAL_COLUMNS"  # columns for a bar; set for rank 0 if stderr of the launcher is a terminal
)


def launcher_columns(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of columns for a bar on the launcher's terminal; 0 if there is none."""
    text = environment.get(LAUNCHER_VARIABLE, "")
    return int(text) if text.isdecimal() else 0


def is_terminal(stream: Any) -> bool:
    """Returns whether a stream is a terminal; None, or an object of a program's own with `write` alone, is none."""
    return bool(getattr(stream, "isatty", bool)())


def has_cursor_control(stream: TextIO) -> bool:
    """Returns whether a stream is a terminal that can overwrite text."""
    return is_terminal(stream) and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


def columns_of(stream: TextIO) -> int:
    """Returns the number of columns for a bar on a stream; 0 if it is no terminal, or one without cursor control."""
    if not has_cursor_control(stream):
        return 0
    try:
        # Some terminals wrap as soon as the last column is written.
        return max(os.get_terminal_size(stream.fileno()).columns - 1, 0)
    except (OSError, ValueError):
        return 0


def leads_to_launcher(stream: TextIO) -> bool:
    """Returns whether a stream is a pipe to a launcher that shows what it reads on a terminal."""
    return bool(launcher_columns()) and _is_pipe(stream)


def is_watched(stream: TextIO) -> bool:
    """Returns whether text on a stream can be overwritten, because it ends in a terminal."""
    return has_cursor_control(stream) or leads_to_launcher(stream)


def _is_pipe(stream: TextIO) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):  # no stream, or one without a file
        return False
