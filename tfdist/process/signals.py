"""Handles signals immediately, whatever the main thread is doing.

Python's own handlers would wait until a call of the engine returns.
"""

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_NOBODY = -1  # instead of a file descriptor
_REPLACED: list[Mapping[int, Any]] = []  # handlers by signal, of the outermost context first

_log = logging.getLogger(__name__)


def can_set_handlers() -> bool:
    """Returns whether this is the main thread, the only one in which Python can set handlers."""
    return threading.current_thread() is threading.main_thread()


def is_free(number: int) -> bool:
    """Returns whether the program has no handler of its own for a signal, which would have to be kept."""
    return signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN, _stays_alive)


@contextlib.contextmanager
def sigterm_preserved() -> Iterator[None]:
    """Restores the SIGTERM handler after the start of an engine that replaces it, so that SIGTERM keeps its effect."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if can_set_handlers():
            _restore({signal.SIGTERM: handler})


@contextlib.contextmanager
def handling(callbacks: Mapping[int, Callable[[int], object]]) -> Iterator[None]:
    """Calls a callback for each of these signals, instead of their usual effect.

    Python writes the number of each signal to a socket, whatever code is running, and a thread reads from it. The
    previous handlers are restored on exit. The context manager can be nested; a signal goes to the innermost one that
    handles it.

    Args:
      callbacks: by signal; called with the signal's number, from another thread, and must return quickly.

    Raises:
      ValueError: this is not the main thread.
    """
    reading, writing = socket.socketpair()
    with reading, writing:
        writing.setblocking(False)  # required by Python
        former = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=_read, args=(reading, callbacks, former), name="signals", daemon=True)
        thread.start()
        try:
            with _handlers(callbacks):
                yield
        finally:
            signal.set_wakeup_fd(former)
            writing.shutdown(socket.SHUT_WR)  # data written before is still read
            thread.join()


@contextlib.contextmanager
def _handlers(numbers: Iterable[int]) -> Iterator[None]:
    before = {number: signal.signal(number, _stays_alive) for number in numbers}
    _REPLACED.append(before)
    try:
        yield
    finally:
        if before in _REPLACED:  # not in a forked process, which has restored them
            _REPLACED.remove(before)
            _restore(before)


def _restore(handlers: Mapping[int, Any]) -> None:
    """Sets handlers that were read before; None is one that was not set from Python."""
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _forget_in_child() -> None:
    """Gives a process that a program forks the usual effects of signals: the sockets are those of its parent."""
    if _REPLACED:
        signal.set_wakeup_fd(_NOBODY)
    while _REPLACED:
        _restore(_REPLACED.pop())


os.register_at_fork(after_in_child=_forget_in_child)


def _read(reading: socket.socket, callbacks: Mapping[int, Callable[[int], object]], former: int) -> None:
    while arrived := reading.recv(1):
        number = arrived[0]
        if number not in callbacks:  # a signal with another handler
            _pass_on(arrived, former)
            continue
        try:
            callbacks[number](number)
        except Exception:
            _log.exception("Handling %s failed", signal.Signals(number).name)


def _pass_on(arrived: bytes, former: int) -> None:
    if former != _NOBODY:
        with contextlib.suppress(OSError):  # full or closed: ignored, as by Python itself
            os.write(former, arrived)


def _stays_alive(number: int, frame: object) -> None:
    """Replaces the default action; without a Python-level handler, nothing is written to the socket."""
