"""Detects the capabilities of terminals, and shows a status line that is overwritten in place."""

import contextlib
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

# Number of columns for a progress bar; set for rank 0 if the launcher's stderr is a terminal.
COLUMNS_VARIABLE = "TFDIST_TERMINAL_COLUMNS"


def launcher_columns(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of columns for a progress bar on the launcher's terminal; 0 without a terminal."""
    text = environment.get(COLUMNS_VARIABLE, "")
    return int(text) if text.isdecimal() else 0


def is_terminal(stream: Any) -> bool:
    """Returns whether a stream is a terminal; None, or an object with only `write`, is not."""
    return bool(getattr(stream, "isatty", bool)())


def has_cursor_control(stream: TextIO) -> bool:
    """Returns whether a stream is a terminal that can overwrite text."""
    return is_terminal(stream) and os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")


def columns_of(stream: TextIO) -> int:
    """Returns the number of columns for a progress bar on a stream; 0 unless it is a terminal with cursor control."""
    if not has_cursor_control(stream):
        return 0
    try:
        # Some terminals wrap as soon as the last column is written.
        return max(os.get_terminal_size(stream.fileno()).columns - 1, 0)
    except (OSError, ValueError):
        return 0


def is_launcher_pipe(stream: TextIO) -> bool:
    """Returns whether a stream is a pipe to a launcher that forwards it to a terminal."""
    try:
        return bool(launcher_columns()) and stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):  # no stream, or one without a file
        return False


def can_overwrite(stream: TextIO) -> bool:
    """Returns whether a stream is shown on a terminal, directly or by a launcher, where text can be overwritten."""
    return has_cursor_control(stream) or is_launcher_pipe(stream)


_ERASE = "\r\x1b[2K"
_CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class StatusLine:
    """A line of a terminal that can be overwritten and hidden, initially empty.

    Text is cut at the width of the terminal, because a wrapped line could not be erased.
    """

    def __init__(self, stream: TextIO):
        self._stream, self._text = stream, ""

    def set(self, text: bytes) -> None:
        """Shows a string in UTF-8; an empty string erases the line."""
        columns = columns_of(self._stream)
        plain = _CONTROL_SEQUENCE.sub("", text.decode(errors="ignore"))
        visible = "".join(character if character.isprintable() else " " for character in plain)[:columns].rstrip()
        if visible != self._text:
            self._text = visible
            _write(self._stream, _ERASE + visible)

    @contextlib.contextmanager
    def hide(self) -> Iterator[None]:
        """Hides the line in a context, in which other lines can be written above it."""
        if self._text:
            _write(self._stream, _ERASE)
        yield
        if self._text:
            _write(self._stream, self._text)


@contextlib.contextmanager
def show_temporarily(text: str) -> Iterator[None]:
    """Shows a string on stderr within a context, if stderr is shown on a terminal."""
    stream = sys.stderr
    if not can_overwrite(stream):
        yield
        return
    visible = text[: columns_of(stream) or launcher_columns() or None]
    _write(stream, visible)
    try:
        yield
    finally:
        _write(stream, f"\r{' ' * len(visible)}\r")  # the launcher does not interpret control sequences


def _write(stream: TextIO, text: str) -> None:
    with contextlib.suppress(OSError, UnicodeEncodeError):  # if it is closed, the next regular output fails
        stream.write(text)
        stream.flush()
