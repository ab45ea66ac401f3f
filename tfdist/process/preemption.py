"""Handles requests to end this process soon: SIGTERM from a scheduler, SIGINT from a terminal."""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tfdist.errors.exit_codes import SIGNALLED
from tfdist.process import signals
from tfdist.process.unblocked_output import print_line

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Set by tfdist's launchers for the processes that they start, and used to find them all.
LAUNCHER_VARIABLE = "TFDIST_LAUNCHER_ID"
# A scheduler may signal all processes of a job and also its launcher, which forwards it as SIGTERM.
TOGETHER_SECONDS = 1.0
CTRL_C = "Ctrl-C"  # SIGINT from the terminal of this process

_log = logging.getLogger(__name__)


def is_at_terminal() -> bool:
    """Returns whether this process is in the foreground of a terminal that is its input, where Ctrl-C sends it SIGINT.

    A scheduler or another program that sends SIGINT has usually started it without one.
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

    In a process that tfdist's launcher has started, all signals are one notice, so that nothing cuts a save short: a
    scheduler may signal the process, and the launcher signal it again, to resize the job or because it is to end. When
    it has to end at once, the launcher kills it.

    Must be entered after the engine has started, whose own handler catches SIGTERM without a visible effect. The
    previous handlers are restored on exit. A signal that was ignored before (SIGINT under nohup) stays ignored. Outside
    the main thread, logs a warning and does nothing, because handlers cannot be set there.

    Args:
      on_notice: called with the name of the signal, or "Ctrl-C" for one from this process's terminal; called from another
        thread, and must return quickly.
    """
    if not signals.can_set_handlers():
        _log.warning(
            "Preemption signals can be handled in the main thread only. Received: thread '%s'. SIGTERM and SIGINT keep "
            "their handlers: train in the main thread, or end the training with a callback.",
            threading.current_thread().name,
        )
        yield
        return
    notice = _Notice(on_notice)
    with signals.handling({n: notice for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}):
        yield


class _Notice:
    """Handles signals that request the end: passes on the first, exits on the second, unless a launcher decides that."""

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
        os._exit(SIGNALLED + number)
