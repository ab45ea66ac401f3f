"""Hearing signals at once, wherever the main thread is: Python's own handlers would wait for the end of the engine's call."""

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

_NOBODY = -1  # in place of a file descriptor

_log = logging.getLogger(__name__)


def can_be_heard() -> bool:
    """Whether this is the main thread, in which alone Python sets handlers."""
    return threading.current_thread() is threading.main_thread()


def is_free(number: int) -> bool:
    """Whether a program has no handler of its own for a signal: it keeps that."""
    return signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN, _stays_alive)


@contextlib.contextmanager
def heard(callbacks: Mapping[int, Callable[[int], object]]) -> Iterator[None]:
    """Inside, each of these signals calls back, and nothing else becomes of it.

    Python writes each signal's number to a socket, from whatever code it arrives in, and a thread reads there. What was
    there before is there again afterwards. Blocks stand in one another: of a signal of both, the inner one hears.

    Args:
      callbacks: by signal; each is called with the signal's number, from another thread, and is to return soon.

    Raises:
      ValueError: this is not the main thread.
    """
    reading, writing = socket.socketpair()
    with reading, writing:
        writing.setblocking(False)  # as Python asks for
        former = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=_read, args=(reading, callbacks, former), name="signals", daemon=True)
        thread.start()
        try:
            with _handlers(callbacks):
                yield
        finally:
            signal.set_wakeup_fd(former)
            writing.shutdown(socket.SHUT_WR)  # what was written before is still read
            thread.join()


@contextlib.contextmanager
def _handlers(numbers: Iterable[int]) -> Iterator[None]:
    before = {number: signal.signal(number, _stays_alive) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _read(reading: socket.socket, callbacks: Mapping[int, Callable[[int], object]], former: int) -> None:
    while arrived := reading.recv(1):
        number = arrived[0]
        if number not in callbacks:  # a signal that others handle
            _pass_on(arrived, former)
            continue
        try:
            callbacks[number](number)
        except Exception:
            _log.exception("What %s asks for could not be done", signal.Signals(number).name)


def _pass_on(arrived: bytes, former: int) -> None:
    if former != _NOBODY:
        with contextlib.suppress(OSError):  # full, or closed: as Python does itself
            os.write(former, arrived)


def _stays_alive(number: int, frame: object) -> None:
    """In place of what the signal would do: without a handler of Python's, nothing is written."""
