"""Handles signals that request the end of this process, independently of the main thread."""

import contextlib
import logging
import math
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

from tfdist.errors import SIGNAL_OFFSET

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
    """Returns the main thread's innermost Python calls as `file:line function`, the innermost last.

    Calls inside TensorFlow are omitted, except for the innermost.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    stack = traceback.extract_stack(frame) if frame else []
    calls = [call for call in stack[:-1] if "/tensorflow/python/" not in call.filename] + stack[-1:]
    return [f"{call.filename}:{call.lineno} {call.name}" for call in calls[-_FRAMES:]]


def caller_location() -> str:
    """Returns the calling thread's location in the program, outside all libraries, as `file, line N`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}, line {frame.f_lineno}"


# A thread handles signals, because Python runs signal handlers only after a call of the engine has returned.

_NO_DESCRIPTOR = -1  # instead of a file descriptor
_PREVIOUS_HANDLERS: list[Mapping[int, Any]] = []  # replaced handlers by signal; the outermost context comes first

_log = logging.getLogger(__name__)


def can_set_handlers() -> bool:
    """Returns whether this is the main thread, the only thread in which Python can set handlers."""
    return threading.current_thread() is threading.main_thread()


def has_default_handler(number: int) -> bool:
    """Returns whether the program has not set a handler for a signal."""
    return signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN, _no_action)


@contextlib.contextmanager
def preserve_sigterm() -> Iterator[None]:
    """Restores the SIGTERM handler after the start of an engine that replaces it."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if can_set_handlers():
            _restore({signal.SIGTERM: handler})


@contextlib.contextmanager
def handle_signals(callbacks: Mapping[int, Callable[[int], object]]) -> Iterator[None]:
    """Calls callbacks for signals, in place of their handlers, which are restored on exit.

    Python writes the number of each signal to a socket, even during a call of the engine, and a thread reads it. Contexts
    can be nested; the innermost one with a callback for a signal handles it.

    Args:
      callbacks: by signal; called with the signal's number from another thread, and must return quickly.

    Raises:
      ValueError: this is not the main thread.
    """
    reader, writer = socket.socketpair()
    with reader, writer:
        writer.setblocking(False)  # required by Python
        previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=_read, args=(reader, callbacks, previous_fd), name="signals", daemon=True)
        thread.start()
        try:
            with _handlers(callbacks):
                yield
        finally:
            signal.set_wakeup_fd(previous_fd)
            writer.shutdown(socket.SHUT_WR)  # earlier data is still read
            thread.join()


@contextlib.contextmanager
def _handlers(numbers: Iterable[int]) -> Iterator[None]:
    previous = {number: signal.signal(number, _no_action) for number in numbers}
    _PREVIOUS_HANDLERS.append(previous)
    try:
        yield
    finally:
        if previous in _PREVIOUS_HANDLERS:  # a forked process has already restored them
            _PREVIOUS_HANDLERS.remove(previous)
            _restore(previous)


def _restore(handlers: Mapping[int, Any]) -> None:
    """Restores handlers; None stands for a handler that was not set from Python."""
    for number, handler in handlers.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _restore_in_child() -> None:  # of a fork, which shares the sockets of its parent
    if _PREVIOUS_HANDLERS:
        signal.set_wakeup_fd(_NO_DESCRIPTOR)
    while _PREVIOUS_HANDLERS:
        _restore(_PREVIOUS_HANDLERS.pop())


os.register_at_fork(after_in_child=_restore_in_child)


def _read(reader: socket.socket, callbacks: Mapping[int, Callable[[int], object]], previous_fd: int) -> None:
    while data := reader.recv(1):
        number = data[0]
        if number not in callbacks:  # a signal with another handler
            if previous_fd != _NO_DESCRIPTOR:
                with contextlib.suppress(OSError):  # full or closed; Python ignores this, too
                    os.write(previous_fd, data)
            continue
        try:
            callbacks[number](number)
        except Exception:
            _log.exception("Handling %s failed", signal.Signals(number).name)


def _no_action(number: int, frame: object) -> None:
    """A handler without effect; Python writes to the socket only if there is a handler."""


OUTPUT_TIMEOUT_SECONDS = 1.0


def print_line(line: str, stream: TextIO) -> None:
    """Prints a line in a single write and flushes the stream; gives up after a second, or if the stream is broken."""
    _run_with_timeout(lambda: (stream.write(f"{line}\n"), stream.flush()))


def flush(stream: TextIO) -> None:
    """Flushes a stream; gives up like `print_line`."""
    _run_with_timeout(stream.flush)


def _run_with_timeout(action: Callable[[], object]) -> None:
    def run() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=run, name="output", daemon=True)
    thread.start()
    thread.join(OUTPUT_TIMEOUT_SECONDS)


SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Set by tfdist's launchers to identify all processes that they start.
LAUNCHER_VARIABLE = "TFDIST_LAUNCHER_ID"
# Signals within this time count as one: a scheduler may signal the processes and their launcher, which forwards it.
TOGETHER_SECONDS = 1.0
CTRL_C = "Ctrl-C"  # SIGINT from the terminal of this process


def is_at_terminal() -> bool:
    """Returns whether this process is in the foreground of a terminal, where Ctrl-C sends it SIGINT.

    Schedulers that send SIGINT usually start processes without a terminal.
    """
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


@contextlib.contextmanager
def termination_notices(on_notice: Callable[[str], object]) -> Iterator[None]:
    """Handles SIGTERM and SIGINT during training: the first one is a notice, the second one exits with code 128 + n.

    Both take effect immediately, even during a call of the engine. Signals within a second of the first one are part of
    the same notice.

    In a process started by tfdist's launcher, all signals are one notice, because no signal may interrupt a save: after a
    scheduler's signal, the launcher may signal the process again to resize or end the job. To end it immediately, the
    launcher kills it.

    Enter the context after the engine has started, because the engine sets its own handler of SIGTERM. The previous
    handlers are restored on exit. Ignored signals (SIGINT under nohup) stay ignored. Outside the main thread, where Python
    cannot set handlers, this context only logs a warning.

    Args:
      on_notice: called with the name of the signal, or "Ctrl-C" for one from this process's terminal; called from another
        thread, and must return quickly.
    """
    if not can_set_handlers():
        _log.warning(
            "Preemption signals can be handled only in the main thread. Received: thread '%s'. SIGTERM and SIGINT keep "
            "their handlers: train in the main thread, or end the training with a callback.",
            threading.current_thread().name,
        )
        yield
        return
    is_launched, first_time = LAUNCHER_VARIABLE in os.environ, math.inf

    def handle(number: int) -> None:
        nonlocal first_time
        at_terminal = number == signal.SIGINT and not is_launched and is_at_terminal()
        name, now = CTRL_C if at_terminal else signal.Signals(number).name, time.monotonic()
        if first_time == math.inf:
            first_time = now
            second = f"second {CTRL_C}" if name == CTRL_C else "second signal" + " to the launcher" * is_launched
            text = f"Received {name}: saving and stopping at the next agreed step; a {second} exits at once."
            print_line(text, sys.stderr)
            on_notice(name)
        elif now - first_time < TOGETHER_SECONDS:
            return
        elif is_launched:
            text = f"Received {name} again: still stopping; a second signal to the launcher exits at once."
            print_line(text, sys.stderr)
        else:
            print_line(f"Received {name} again: exiting at once.", sys.stderr)
            os._exit(SIGNAL_OFFSET + number)

    with handle_signals({n: handle for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}):
        yield
