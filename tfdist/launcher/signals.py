"""The signals that ask a launcher to end."""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tfdist.process.preemption import TOGETHER_SECONDS

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def received(numbers: tuple[signal.Signals, ...] = ENDING) -> Iterator[list[int]]:
    """Collects the signals that arrive inside, in their order, in place of what they would do.

    What comes within a second of the first belongs to it: a terminal that closes says so twice, and systemd sends SIGHUP
    behind SIGTERM. SIGHUP that was ignored before, as under nohup, stays so.

    SIGUSR1, which asks a training process where it is, is ignored, and so it is in processes that are started inside, until
    they are ready to hear it: it must not end one that has only just been started.
    """
    arrived: list[int] = []
    first = math.inf

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        first = min(first, time.monotonic())
        if not arrived or time.monotonic() - first >= TOGETHER_SECONDS:
            arrived.append(number)

    # Under nohup a launcher outlives its terminal.
    ignored = {number for number in numbers if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN}
    before = {number: signal.signal(number, note) for number in numbers if number not in ignored}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield arrived
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
