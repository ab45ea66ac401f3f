"""Descriptions of exit codes."""

import contextlib
import signal
import threading
from collections.abc import Iterator

from tfdist.errors import ExitCode, TfdistError

MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.FAILED: "failed",
    ExitCode.BAD_INPUT: "bad input",
    ExitCode.NOT_FINITE: "loss not finite",
    ExitCode.STALLED: "stalled",
    ExitCode.PEER_LOST: "a peer was lost",
    ExitCode.OUT_OF_MEMORY: "out of memory",
    ExitCode.PREEMPTED: "preempted",
}
SIGNALLED = 128  # as in a shell: 128 + number of the signal that ended the process


def describe(code: int) -> str:
    """Returns `code 3 (loss not finite)`, `code 137 (killed by SIGKILL)`, or `code 42`.

    Args:
      code: an exit code in [0, 255].
    """
    if code > SIGNALLED and code - SIGNALLED in signal.valid_signals():
        return f"code {code} (killed by {signal.Signals(code - SIGNALLED).name})"
    meaning = MEANINGS.get(code)  # type: ignore[call-overload]  # an IntEnum equals its number
    return f"code {code} ({meaning})" if meaning else f"code {code}"


def of_error(error: BaseException) -> str:
    """Returns the kind of an error, not its message: `loss not finite`, `interrupted`, or `failed`."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return MEANINGS[error.exit_code if isinstance(error, TfdistError) else ExitCode.FAILED]


@contextlib.contextmanager
def sigterm_ends() -> Iterator[None]:
    """Restores the SIGTERM handler after the start of an engine that replaces it, so that SIGTERM keeps its effect.

    Does nothing outside the main thread, where Python cannot set handlers.
    """
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
