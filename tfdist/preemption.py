"""Hearing at once that this process must end soon: SIGTERM from a scheduler, SIGINT from a terminal."""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

from tfdist.endings import SIGNALLED

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def notices(on_notice: Callable[[str], object]) -> Iterator[None]:
    """Around a training: the first SIGTERM or SIGINT is a notice, and the second ends the process with code 128 + n.

    Both act at once, also while the main thread is inside a call of the engine, where Python's own handlers would wait for
    its end: Python writes each signal's number to a socket, from whatever code it arrives in, and a thread reads there.

    It belongs behind the start of the engine, whose own handler takes SIGTERM and does nothing that is seen. What was there
    before is there again afterwards. A signal that was ignored before (SIGINT under nohup) stays so. Only the main thread
    can do all this: elsewhere this says so, and does nothing.

    Args:
      on_notice: called with the signal's name, from another thread; to return soon.
    """
    thread = threading.current_thread()
    if thread is not threading.main_thread():
        _log.warning(
            "Signals are taken for notices in the main thread alone. Received: thread '%s'. SIGTERM and SIGINT do here what "
            "they did before: train in the main thread, or end the training by a callback.",
            thread.name,
        )
        yield
        return
    numbers = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    reading, writing = socket.socketpair()
    with reading, writing, _reader(reading, writing, numbers, on_notice), _handlers(numbers, writing):
        yield


@contextlib.contextmanager
def _handlers(numbers: Sequence[int], writing: socket.socket) -> Iterator[None]:
    """Inside, each signal's number is written, and nothing else becomes of it."""
    writing.setblocking(False)  # as Python asks for
    before = {number: signal.signal(number, _stays_alive) for number in numbers}
    former = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def _reader(
    reading: socket.socket, writing: socket.socket, numbers: Sequence[int], on_notice: Callable[[str], object]
) -> Iterator[None]:
    thread = threading.Thread(target=_read, args=(reading, numbers, on_notice), name="notices", daemon=True)
    thread.start()
    try:
        yield
    finally:
        writing.shutdown(socket.SHUT_WR)  # what was written before is still read
        thread.join()


def _read(reading: socket.socket, numbers: Sequence[int], on_notice: Callable[[str], object]) -> None:
    noticed = False
    while arrived := reading.recv(1):
        number = arrived[0]
        if number not in numbers:  # a signal that others handle
            continue
        name = signal.Signals(number).name
        if noticed:
            _say(f"Received {name} again: ends at once.")
            os._exit(SIGNALLED + number)
        noticed = True
        _say(f"Received {name}: stops at the next agreed step and saves; a second signal ends at once.")
        try:
            on_notice(name)
        except Exception:
            _log.exception("The notice of %s could not be passed on", name)


def _stays_alive(number: int, frame: object) -> None:
    """In place of what the signal would do: without a handler of Python's, nothing is written."""


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a stream that is closed must not keep the notice from being heard
        print(line, file=sys.stderr, flush=True)
