"""Signals that request the end of this process, handled independently of the main thread."""

import contextlib
import logging
import os
import pathlib
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TextIO

from tfdist.errors.exceptions import SIGNAL_OFFSET

_FRAMES = 8
_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_PATHS = sysconfig.get_paths()
_LIBRARIES = (
    *(_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    f"{_PACKAGE}/",
    f"{_PACKAGE.parent / 'strategies'}/",
    "<frozen",
)


def main_stack() -> list[str]:
    """Returns the main thread's innermost Python calls, each as `file:line function`, the innermost last.

    Of TensorFlow's calls, only the last one is included.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame else []
    calls = [call for call in stack[:-1] if "/tensorflow/python/" not in call.filename] + stack[-1:]
    return [f"{call.filename}:{call.lineno} {call.name}" for call in calls[-_FRAMES:]]


def caller_location() -> str:
    """Returns the calling thread's location in the program's own code, outside all libraries, as `file, line N`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}"


# Signals are handled by a thread: Python's own handlers would wait until a call of the engine returns.

_NO_DESCRIPTOR = -1  # instead of a file descriptor
_REPLACED: list[Mapping[int, Any]] = []  # handlers by signal, of the outermost context first

_log = logging.getLogger(__name__)


def can_set_handlers() -> bool:
    """Returns whether this is the main thread, the only one in which Python can set handlers."""
    return threading.current_thread() is threading.main_thread()


def is_free(number: int) -> bool:
    """Returns whether the program has no handler of its own for a signal, which must not be replaced."""
    return signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN, _no_action)


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

    Python writes the number of each signal to a socket, during any call, and a thread reads from it. The previous handlers
    are restored on exit. The context manager can be nested; the innermost one for a signal handles it.

    Args:
      callbacks: by signal; called with the signal's number from another thread, and must return quickly.

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
    previous = {number: signal.signal(number, _no_action) for number in numbers}
    _REPLACED.append(previous)
    try:
        yield
    finally:
        if previous in _REPLACED:  # not in a forked process, which has restored them
            _REPLACED.remove(previous)
            _restore(previous)


def _restore(handlers: Mapping[int, Any]) -> None:
    """Sets handlers that were read before; None is one that was not set from Python."""
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _restore_in_child() -> None:
    """Restores the usual effects of signals in a forked process: the sockets are those of its parent."""
    if _REPLACED:
        signal.set_wakeup_fd(_NO_DESCRIPTOR)
    while _REPLACED:
        _restore(_REPLACED.pop())


os.register_at_fork(after_in_child=_restore_in_child)


def _read(reading: socket.socket, callbacks: Mapping[int, Callable[[int], object]], former: int) -> None:
    while data := reading.recv(1):
        number = data[0]
        if number not in callbacks:  # a signal with another handler
            _forward(data, former)
            continue
        try:
            callbacks[number](number)
        except Exception:
            _log.exception("Handling %s failed", signal.Signals(number).name)


def _forward(data: bytes, former: int) -> None:
    if former != _NO_DESCRIPTOR:
        with contextlib.suppress(OSError):  # full or closed: ignored, as by Python itself
            os.write(former, data)


def _no_action(number: int, frame: object) -> None:
    """Replaces the default action; without a Python-level handler, nothing is written to the socket."""


PATIENCE_SECONDS = 1.0


def print_line(line: str, stream: TextIO) -> None:
    """Prints a line and flushes the stream; gives up after a second, or if the stream is closed or broken.

    It is one write, which the output of other threads and libraries cannot split.
    """
    _try(lambda: (stream.write(f"{line}\n"), stream.flush()))


def flush(stream: TextIO) -> None:
    """Flushes a stream; gives up as `print_line` does."""
    _try(stream.flush)


def _try(action: Callable[[], object]) -> None:
    def suppressed() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=suppressed, name="output", daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)


SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Set by tfdist's launchers for the processes that they start, and used to find them all.
LAUNCHER_VARIABLE = "TFDIST_LAUNCHER_ID"
# A scheduler may signal all processes of a job and also its launcher, which forwards it as SIGTERM.
TOGETHER_SECONDS = 1.0
CTRL_C = "Ctrl-C"  # SIGINT from the terminal of this process


def is_at_terminal() -> bool:
    """Returns whether this process is in the foreground of a terminal that is its input, where Ctrl-C sends it SIGINT.

    A scheduler or another program that sends SIGINT usually starts processes without a terminal.
    """
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


@contextlib.contextmanager
def notices(on_notice: Callable[[str], object]) -> Iterator[None]:
    """Handles SIGTERM and SIGINT during training: the first one is a notice, the second one exits with code 128 + n.

    Both take effect immediately, even while the main thread is inside a call of the engine. Signals within a second of
    the first one belong to the same notice.

    In a process that tfdist's launcher has started, all signals are one notice, so that no signal interrupts a save: a
    scheduler may signal the process, and the launcher signal it again, to resize or end the job. To end it immediately,
    the launcher kills it.

    Must be entered after the engine has started, whose own handler catches SIGTERM without a visible effect. The
    previous handlers are restored on exit. A signal that was ignored before (SIGINT under nohup) stays ignored. Outside
    the main thread, logs a warning and does nothing, because handlers cannot be set there.

    Args:
      on_notice: called with the name of the signal, or "Ctrl-C" for one from this process's terminal; called from another
        thread, and must return quickly.
    """
    if not can_set_handlers():
        _log.warning(
            "Preemption signals can be handled in the main thread only. Received: thread '%s'. SIGTERM and SIGINT keep "
            "their handlers: train in the main thread, or end the training with a callback.",
            threading.current_thread().name,
        )
        yield
        return
    notice = _Notice(on_notice)
    with handling({n: notice for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}):
        yield


class _Notice:
    """Handles signals that request the end: forwards the first, and exits on the second, unless a launcher does."""

    def __init__(self, on_notice: Callable[[str], object]):
        self._on_notice = on_notice
        self._since: float | None = None
        self._is_launched = LAUNCHER_VARIABLE in os.environ

    def __call__(self, number: int) -> None:
        name, now = self._name(number), time.monotonic()
        if self._since is not None:
            if now - self._since >= TOGETHER_SECONDS:
                self._repeated(name, number)
            return
        self._since = now
        second = "a second signal to the launcher" if self._is_launched else f"a second {self._kind(name)}"
        print_line(f"Received {name}: saving and stopping at the next agreed step; {second} exits at once.", sys.stderr)
        self._on_notice(name)

    def _name(self, number: int) -> str:
        at_terminal = number == signal.SIGINT and not self._is_launched and is_at_terminal()
        return CTRL_C if at_terminal else signal.Signals(number).name

    @staticmethod
    def _kind(name: str) -> str:
        return name if name == CTRL_C else "signal"

    def _repeated(self, name: str, number: int) -> None:
        if self._is_launched:
            print_line(
                f"Received {name} again: still stopping; a second signal to the launcher exits at once.", sys.stderr
            )
            return
        print_line(f"Received {name} again: exiting at once.", sys.stderr)
        os._exit(SIGNAL_OFFSET + number)
