"""Hearing at once that this process must end soon: SIGTERM from a scheduler, SIGINT from a terminal."""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

from tfdist.endings import SIGNALLED

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def notices(on_notice: Callable[[str], object], on_report: Callable[[], object] | None = None) -> Iterator[None]:
    """Around a training: the first SIGTERM or SIGINT is a notice, and the second ends the process with code 128 + n.

    Both act at once, also while the main thread is inside a call of the engine, where Python's own handlers would wait for
    its end: Python writes each signal's number to a socket, from whatever code it arrives in, and a thread reads there.

    It belongs behind the start of the engine, whose own handler takes SIGTERM and does nothing that is seen. What was there
    before is there again afterwards. A signal that was ignored before (SIGINT under nohup) stays so. Only the main thread
    can do all this: elsewhere this says so, and does nothing.

    Args:
      on_notice: called with the signal's name, from another thread; to return soon.
      on_report: called likewise at each SIGUSR1, by which somebody asks where the run is; None to leave that alone.
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
    notice = _Notice(on_notice)
    heard: dict[int, Callable[[int], object]] = {
        n: notice for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN
    }
    if on_report is not None:
        heard[signal.SIGUSR1] = lambda _: on_report()
    reading, writing = socket.socketpair()
    with reading, writing, _reader(reading, writing, heard), _handlers(heard, writing):
        yield


@contextlib.contextmanager
def _handlers(numbers: Iterable[int], writing: socket.socket) -> Iterator[None]:
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
    reading: socket.socket, writing: socket.socket, heard: Mapping[int, Callable[[int], object]]
) -> Iterator[None]:
    thread = threading.Thread(target=_read, args=(reading, heard), name="notices", daemon=True)
    thread.start()
    try:
        yield
    finally:
        writing.shutdown(socket.SHUT_WR)  # what was written before is still read
        thread.join()


def _read(reading: socket.socket, heard: Mapping[int, Callable[[int], object]]) -> None:
    while arrived := reading.recv(1):
        number = arrived[0]
        if number not in heard:  # a signal that others handle
            continue
        try:
            heard[number](number)
        except Exception:
            _log.exception("The notice of %s could not be passed on", signal.Signals(number).name)


class _Notice:
    """What becomes of a signal that asks for the end: the first is passed on, the second ends the process."""

    def __init__(self, on_notice: Callable[[str], object]):
        self._on_notice = on_notice
        self._noticed = False

    def __call__(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._noticed:
            _say(f"Received {name} again: ends at once.")
            os._exit(SIGNALLED + number)
        self._noticed = True
        _say(f"Received {name}: stops at the next agreed step and saves; a second signal ends at once.")
        self._on_notice(name)


def _stays_alive(number: int, frame: object) -> None:
    """In place of what the signal would do: without a handler of Python's, nothing is written."""


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a stream that is closed must not keep the notice from being heard
        print(line, file=sys.stderr, flush=True)
