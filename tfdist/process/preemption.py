"""Hearing at once that this process must end soon: SIGTERM from a scheduler, SIGINT from a terminal."""

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

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A scheduler may signal all processes of a job, and its launcher, which passes that on as SIGTERM.
TOGETHER_SECONDS = 1.0

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def notices(on_notice: Callable[[str], object]) -> Iterator[None]:
    """Around a training: the first SIGTERM or SIGINT is a notice, and the second ends the process with code 128 + n.

    Both act at once, also while the main thread is inside a call of the engine. What comes within a second of
    the first is the same notice.

    It belongs behind the start of the engine, whose own handler takes SIGTERM and does nothing that is seen. What was there
    before is there again afterwards. A signal that was ignored before (SIGINT under nohup) stays so. Only the main thread
    can do all this: elsewhere this says so, and does nothing.

    Args:
      on_notice: called with the signal's name, from another thread; to return soon.
    """
    if not signals.can_be_heard():
        _log.warning(
            "Signals are taken for notices in the main thread alone. Received: thread '%s'. SIGTERM and SIGINT do here what "
            "they did before: train in the main thread, or end the training by a callback.",
            threading.current_thread().name,
        )
        yield
        return
    notice = _Notice(on_notice)
    with signals.heard({n: notice for n in SIGNALS if signal.getsignal(n) is not signal.SIG_IGN}):
        yield


class _Notice:
    """What becomes of a signal that asks for the end: the first is passed on, the second ends the process."""

    def __init__(self, on_notice: Callable[[str], object]):
        self._on_notice = on_notice
        self._since: float | None = None

    def __call__(self, number: int) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if self._since is not None:
            if now - self._since < TOGETHER_SECONDS:
                return
            _say(f"Received {name} again: ends at once.")
            os._exit(SIGNALLED + number)
        self._since = now
        _say(f"Received {name}: stops at the next agreed step and saves; a second signal ends at once.")
        self._on_notice(name)


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a stream that is closed must not keep the notice from being heard
        print(line, file=sys.stderr, flush=True)
