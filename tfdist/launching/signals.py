"""The signals that ask a launcher to end."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def received(numbers: tuple[signal.Signals, ...] = ENDING) -> Iterator[list[int]]:
    """Collects the signals that arrive inside, in their order, in place of what they would do."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
