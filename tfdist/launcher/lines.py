"""What a process writes, cut into lines for a screen that several processes share."""

import time
from collections.abc import Callable, Iterator

LONGEST = 1 << 16  # bytes: what has no end by then is shown as it is
PROGRESS_SECONDS = 1.0  # between two states of a progress bar that are shown


class Lines:
    """Cuts a stream of bytes into lines.

    What ends in a carriage return will be written over by what follows, as a progress bar does: of such states at most
    one a second is shown, and of a line that has several parts the last.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        """Args: clock: in seconds."""
        self._clock = clock
        self._pending = b""
        self._shown = -PROGRESS_SECONDS

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the lines that `data` completes, without their ends."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            yield _last_state(line)
        text = self._pending.rstrip(b"\r")  # a return at the end may be the first half of a \r\n
        *states, last = text.split(b"\r")
        self._pending = last + self._pending[len(text) :]
        yield from self._progress([state for state in states if state])
        while len(self._pending) > LONGEST:
            yield self._pending[:LONGEST]
            self._pending = self._pending[LONGEST:]

    def end(self) -> Iterator[bytes]:
        """Yields what is left at the end of the stream."""
        if self._pending:
            yield _last_state(self._pending)
            self._pending = b""

    def _progress(self, states: list[bytes]) -> Iterator[bytes]:
        now = self._clock()
        if states and now - self._shown >= PROGRESS_SECONDS:
            self._shown = now
            yield states[-1]


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
