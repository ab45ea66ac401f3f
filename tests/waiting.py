"""How tests wait: for a condition, never for a time, as a loaded machine may need much longer than an idle one."""

import os
import time
from collections.abc import Callable
from typing import IO, TypeVar

DEADLINE = 120.0  # seconds after which a test fails; where it passes, it does not wait for them

_Found = TypeVar("_Found")


def wait_for(condition: Callable[[], _Found], seconds: float = DEADLINE) -> _Found:
    """Returns what a condition returns, as soon as that is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.005)
    return found


def read_line(stream: IO[str] | None) -> str:
    """Waits for one line of a process's output and leaves all that follows it in the pipe.

    The stream's own `readline` reads ahead, and `communicate` does not return what it has read: a process that prints
    two lines before the first is read would seem to have printed one.
    """
    assert stream
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(stream.fileno(), 1)):
        line += byte
    return line.decode()


class Clock:
    """A simulated clock, which stands still until its time is set."""

    now = 100.0

    def __call__(self) -> float:
        """Returns the time in seconds."""
        return self.now
