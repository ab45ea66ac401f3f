"""A progress bar as text that overwrites itself, for notebooks, and for a launcher that shows it on its terminal."""

from collections.abc import Callable
from time import monotonic
from typing import TextIO

from tfdist.reporting.bar_reporter import BarReporter
from tfdist.reporting.bar_text import BarText


class InPlaceReporter(BarReporter):
    """Displays a progress bar with a carriage return as the only control character.

    It follows each state of the bar, so that what the process logs meanwhile replaces the bar until the next state.

    Args:
      stream: output stream. It is flushed after each write, and not closed at the end.
      width: columns of a line.
      seconds: minimum interval between two states of the bar.
      clock: monotonic clock in seconds.
    """

    def __init__(self, stream: TextIO, width: int, seconds: float = 0.1, clock: Callable[[], float] = monotonic):
        super().__init__(seconds, clock)
        self._stream, self._width = stream, width
        self._columns = 0  # of the state that is shown

    def _print(self, text: str) -> None:
        self._write(text.ljust(self._columns) + "\n")
        self._columns = 0

    def _open_bar(self) -> None:
        pass

    def _draw_bar(self, text: BarText) -> None:
        self._overwrite(str(text.line(self._width)))

    def _close_bar(self) -> None:
        self._write("\n")
        self._columns = 0

    def _overwrite(self, text: str) -> None:
        """Shows a text instead of the current state, padded to cover it."""
        self._write(text.ljust(self._columns) + "\r")
        self._columns = len(text)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
