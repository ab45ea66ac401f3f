"""Handling of uncaught errors: the exit code of a process started by a launcher, and the notification of other processes.

A failed process may be kept alive by a thread that does not end or by an exit handler that waits for other processes, so its
failure is reported before them. A failure by `sys.exit` is noticed only when the process has ended.
"""

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from tfdist.cluster.signals import LAUNCHER_VARIABLE
from tfdist.errors import InputError, TfdistError, one_line

_log = logging.getLogger(__name__)


def on_uncaught_error(callback: Callable[[BaseException], object]) -> None:
    """Adds a function that is called with the error that ends the main thread, unless the program replaces `sys.excepthook`.

    It is called after Python has printed the error, and before Python waits for threads and exit handlers.
    """
    original_hook = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            original_hook(kind, error, trace)
        finally:
            callback(error)

    sys.excepthook = excepthook


def message_with_location(error: InputError) -> str:
    """Returns the message of an error, with the line of the main script that caused it."""
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        if frame.f_globals.get("__name__") == "__main__":
            return f"{frame.f_code.co_filename}, line {line}: {error}"
    return str(error)


def install_exit_code_hook() -> None:
    """Makes an uncaught `TfdistError` end a process of a launcher with a one-line message and the error's exit code.

    The exit code tells the launcher whether to restart the program. Other processes keep Python's traceback, as users
    expect of an imported library.
    """
    if LAUNCHER_VARIABLE not in os.environ:
        return
    original_hook = sys.excepthook

    def excepthook(kind: type[BaseException], exception: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(exception, TfdistError):
            original_hook(kind, exception, trace)
            return
        _log.debug("Traceback of the error:", exc_info=exception)
        message = message_with_location(exception) if isinstance(exception, InputError) else exception
        with contextlib.suppress(OSError):  # the output is closed; the exit code still counts
            print(f"tfdist: {one_line(str(message))}", file=sys.stderr)
        raise SystemExit(int(exception.exit_code))

    sys.excepthook = excepthook
