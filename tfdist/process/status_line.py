"""The last line of a terminal: a text while something loads, or a launcher's line with the progress bar of rank 0."""

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import TextIO

from tfdist.process import terminal

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
        columns = terminal.columns_of(self._stream)
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
    return StatusLine(stream) if terminal.columns_of(stream) else None


@contextlib.contextmanager
def showing(text: str) -> Iterator[None]:
    """Context in which a text is shown on stderr, if that ends in a terminal."""
    stream = sys.stderr
    if not terminal.is_watched(stream):
        yield
        return
    shown = text[: terminal.columns_of(stream) or terminal.launcher_columns() or None]
    _write(stream, shown)
    try:
        yield
    finally:
        _write(stream, f"\r{' ' * len(shown)}\r")  # a launcher reads no control sequences


def _write(stream: TextIO, text: str) -> None:
    with contextlib.suppress(OSError, UnicodeEncodeError):  # a closed terminal is noticed by the lines
        stream.write(text)
        stream.flush()
