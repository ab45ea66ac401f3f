"""The signals that request the end of a launcher."""

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
    """Collects the signals that arrive in the body, in order, instead of their usual effect.

    Signals within a second of the first one are ignored as part of it: a closing terminal sends two, and systemd sends
    SIGHUP after SIGTERM. If SIGHUP was ignored before, as under nohup, it stays so.

    SIGUSR1, which asks a training process for a report, is ignored here and, until they install their handlers, in
    processes started in the body: it must not kill one that is just starting.

    Args:
      numbers: the signals to collect.
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
