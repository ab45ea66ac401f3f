"""A log of what untrusted clients do, which they cannot flood."""

import collections
import logging
import threading
import time
import traceback
from collections.abc import Callable

from tfdist.coordination.messages import printable

MOST_LINES = 10  # per minute and level
LONGEST_LINE = 500  # characters
_MINUTE = 60.0


class LimitedLog:
    """Writes the first lines of each minute to a log, and then the number of the others.

    Lines are limited in length, and without control characters.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic):
        """Initializes without lines.

        Args:
          log: where the lines are written.
          clock: returns the time in seconds.
        """
        self._log, self._clock = log, clock
        self._writing = threading.Lock()  # guards the attributes below
        self._began = clock()
        self._lines: collections.Counter[int] = collections.Counter()  # by level

    def warning(self, line: str) -> None:
        """Writes a warning."""
        self._write(logging.WARNING, line)

    def error(self, what: str, error: Exception) -> None:
        """Writes that something has failed by an exception that nothing expects, with its traceback."""
        frames = "".join(traceback.format_tb(error.__traceback__))
        self._write(logging.ERROR, f"{what} ({type(error).__name__}: {error})", f"\n{frames}")

    def summarize(self, now: bool = False) -> None:
        """Writes how many lines were left out, if their minute is over; call it from time to time.

        Args:
          now: whether not to wait for the end of the minute, as nothing will follow.
        """
        with self._writing:
            self._summarize(now)

    def _write(self, level: int, line: str, trusted: str = "") -> None:
        with self._writing:
            self._summarize()
            self._lines[level] += 1
            if self._lines[level] <= MOST_LINES:
                self._log.log(level, "%s%s", printable(line, LONGEST_LINE), trusted)

    def _summarize(self, now: bool = False) -> None:
        if not now and self._clock() - self._began < _MINUTE:
            return
        left_out = sum(max(0, lines - MOST_LINES) for lines in self._lines.values())
        if left_out:
            self._log.warning("... and %d more lines about connections in the last minute", left_out)
        self._began = self._clock()
        self._lines.clear()
