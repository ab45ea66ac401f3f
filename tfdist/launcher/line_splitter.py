"""Splits the output of a process into lines for a screen that several processes share."""

import time
from collections.abc import Callable, Iterator

LONGEST = 1 << 16  # bytes; a longer line is shown in pieces
PROGRESS_SECONDS = 1.0  # minimum interval between two shown states of a progress bar


class LineSplitter:
    """Splits a stream of bytes into lines.

    Text that ends in a carriage return will be overwritten, as by a progress bar: at most one such state per second is
    yielded, and only the last one of a complete line.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, yields_states: bool = True):
        """Initializes with a `clock` that returns seconds; without `yields_states`, only complete lines are yielded."""
        self._clock = clock
        self._yields_states = yields_states
        self._pending = b""
        self._shown = -PROGRESS_SECONDS

    @property
    def current(self) -> bytes:
        """The last state of the incomplete line."""
        return _last_state(self._pending)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the lines that `data` completes, without line ends."""
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            yield _last_state(line)
        text = self._pending.rstrip(b"\r")  # a carriage return at the end may be the first half of \r\n
        *states, last = text.split(b"\r")
        self._pending = last + self._pending[len(text) :]
        yield from self._progress([state for state in states if state])
        while len(self._pending) > LONGEST:
            yield self._pending[:LONGEST]
            self._pending = self._pending[LONGEST:]

    def end(self) -> Iterator[bytes]:
        """Yields the rest at the end of the stream."""
        if self._pending:
            yield _last_state(self._pending)
            self._pending = b""

    def _progress(self, states: list[bytes]) -> Iterator[bytes]:
        now = self._clock()
        if self._yields_states and states and now - self._shown >= PROGRESS_SECONDS:
            self._shown = now
            yield states[-1]


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]
