"""The exit status of this process, available before Python waits for threads and exit handlers.

A thread that does not end, or an exit handler that waits for other processes, can delay the end of a failed process, which
must not hide its failure. Python has no hook for `SystemExit`, so this module replaces `sys.exit`. `raise SystemExit(1)` in
a program is not detected.
"""

import contextlib
import functools
import importlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from tfdist.cluster.signals import LAUNCHER_VARIABLE
from tfdist.errors import InputError, TfdistError
from tfdist.errors.engine_errors import one_line

_callbacks: list[Callable[[BaseException], object]] = []
_exits: list[SystemExit] = []  # the last one determines the exit status
_log = logging.getLogger(__name__)


def cause() -> BaseException | None:
    """Returns the exception that ended the main thread: an uncaught error, or a `SystemExit` of any code.

    Returns None if the main thread is running or has ended without an exception.
    """
    return _exits[-1] if _exits else getattr(sys, "last_value", None)


def add_callback(callback: Callable[[BaseException], object]) -> None:
    """Adds a function that is called with `cause()` when the main thread has ended with an exception.

    It is called after Python has printed the exception, and before Python waits for threads and exit handlers.
    """
    watch()
    _callbacks.append(callback)


@functools.cache
def watch() -> None:
    """Starts to record the exit status. Call it early: `sys.exit(main())` looks up `sys.exit` before it calls `main`."""
    sys.exit = _wrap_exit(sys.exit)
    # These modules register functions that wait for executors; functions registered later run earlier.
    for module in ("concurrent.futures.thread", "concurrent.futures.process"):
        importlib.import_module(module)
    with contextlib.suppress(RuntimeError):  # this process is already ending
        threading._register_atexit(_report)  # type: ignore[attr-defined]


def _report() -> None:
    error = cause()
    if error is None:
        return
    for callback in _callbacks:
        try:
            callback(error)
        except Exception:  # otherwise Python would not wait for threads
            _log.exception("Reporting the exit status failed")


class _Exit(SystemExit):
    """The exception of `sys.exit`, which detects that Python ends the process: it then reads `code` without a calling frame."""

    def _get_code(self) -> Any:
        if sys._getframe().f_back is None:
            _exits.append(self)
        return _CODE.__get__(self)

    def _set_code(self, code: Any) -> None:
        _CODE.__set__(self, code)

    code = property(_get_code, _set_code)

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args


_CODE: Any = SystemExit.__dict__["code"]
_Exit.__name__, _Exit.__qualname__, _Exit.__module__ = "SystemExit", "SystemExit", "builtins"  # when it is printed


def _wrap_exit(original: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    @functools.wraps(original)
    def exit(status: Any = None, /) -> NoReturn:
        try:
            original(status)
        except SystemExit as error:
            if threading.current_thread() is not threading.main_thread():
                raise  # `threading` ignores SystemExit itself, but not its subclasses
            raise _Exit(*error.args) from None

    return exit


def message_with_location(error: InputError) -> str:
    """Returns the message of an error, with the line of the main script that caused it."""
    for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
        if frame.f_globals.get("__name__") == "__main__":
            return f"{frame.f_code.co_filename}, line {line}: {error}"
    return str(error)


def end_with_exit_codes() -> None:
    """Makes uncaught errors of tfdist end a process of a launcher with one line and the error's exit code.

    The exit code tells the launcher whether to restart the program. Other processes keep Python's traceback, as users
    expect of an imported library.
    """
    if LAUNCHER_VARIABLE not in os.environ:
        return
    watch()  # a failed rank leaves its group, see `tfdist.coordination.client`
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


def call_excepthook(error: BaseException) -> None:
    """Reports an error by `sys.excepthook`, as Python does before it ends a process.

    Raises:
      SystemExit: raised by the hook.
    """
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as hook_error:
        for title, exception in (("Error in sys.excepthook:", hook_error), ("\nOriginal exception was:", error)):
            print(title, file=sys.stderr)
            traceback.print_exception(exception)
