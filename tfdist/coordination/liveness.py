"""Detects that the other end of a connection is silent."""

import time
from collections.abc import Callable

from tfdist.coordination.messages import MessageReader


class Liveness:
    """Since when nothing has been received; only messages that are complete and verified count."""

    def __init__(self, lines: MessageReader, interval: float, clock: Callable[[], float] = time.monotonic):
        """Initializes as if a message had been received now.

        Args:
          lines: reads the messages.
          interval: seconds between two calls of `is_silent` if nothing delays this process.
          clock: returns the time in seconds.
        """
        self._lines, self._interval, self._clock = lines, interval, clock
        self._heard = self._checked = clock()

    def heard(self) -> None:
        """Records that a message has been received."""
        self._heard = self._clock()

    def is_silent(self, limit: float) -> bool:
        """Returns whether no message has been received for `limit` seconds, and the time that a part of one needs."""
        now = self._clock()
        if now - self._checked > self._interval + 1.0:  # this process was suspended or starved, not the other end
            self._heard = min(now, self._heard + now - self._checked)
        self._checked = now
        return now - self._heard > limit + self._lines.allowance
