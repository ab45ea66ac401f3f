"""How tests wait: for a condition, never for a time, as a loaded machine may need much longer than an idle one."""

import time
from collections.abc import Callable
from typing import TypeVar

DEADLINE = 120.0  # seconds after which a test fails; where it passes, it does not wait for them

_Found = TypeVar("_Found")


def wait_for(condition: Callable[[], _Found], seconds: float = DEADLINE) -> _Found:
    """Returns what a condition returns, as soon as that is true."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {seconds:g} s"
        time.sleep(0.005)
    return found
