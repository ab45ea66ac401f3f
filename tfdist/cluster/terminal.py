"""Terminals on which text can be overwritten, and their last line."""

import contextlib
import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
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


_ERASE = "\r\x1b[2K"
_CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class StatusLine:
    """A line of a terminal that can be overwritten and hidden.

    A line of text that is wider than the terminal is cut, because one that wraps could not be erased.
    """

    def __init__(self, stream: TextIO):
        """Initializes with nothing to show on a terminal."""
        self._stream, self._text = stream, ""

    def set(self, text: bytes) -> None:
        """Shows a text, encoded in UTF-8; an empty one erases the line."""
        columns = columns_of(self._stream)
        plain = _CONTROL_SEQUENCE.sub("", text.decode(errors="ignore"))
        shown = "".join(character if character.isprintable() else " " for character in plain)[:columns].rstrip()
        if shown != self._text:
            self._text = shown
            self._write(_ERASE + shown)

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Context in which lines can be written above."""
        if self._text:
            self._write(_ERASE)
        yield
        if self._text:
            self._write(self._text)

    def _write(self, text: str) -> None:
        _write(self._stream, text)


def on_terminal(stream: TextIO) -> StatusLine | None:
    """Returns a status line on a stream; None if that is no terminal."""
    return StatusLine(stream) if columns_of(stream) else None


@contextlib.contextmanager
def showing(text: str) -> Iterator[None]:
    """Context in which a text is shown on stderr, if that ends in a terminal."""
    stream = sys.stderr
    if not is_watched(stream):
        yield
        return
    shown = text[: columns_of(stream) or launcher_columns() or None]
    _write(stream, shown)
    try:
        yield
    finally:
        _write(stream, f"\r{' ' * len(shown)}\r")  # a launcher reads no control sequences


def _write(stream: TextIO, text: str) -> None:
    with contextlib.suppress(OSError, UnicodeEncodeError):  # a closed terminal is noticed by the lines
        stream.write(text)
        stream.flush()
