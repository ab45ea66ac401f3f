"""Exit status of this process, known once its main thread has ended, before Python waits for threads and exit handlers.

A thread that does not end, or an exit handler that waits for other processes, can keep a process from ending, which must
not hide its failure. Python calls no hook for `SystemExit`, so that its exit status is known only if it is raised by
`sys.exit`, which is replaced here. `raise SystemExit(1)` in a program is not detected.
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

_calls: list[Callable[[BaseException], object]] = []
_exits: list[SystemExit] = []  # the last one ends this process
_log = logging.getLogger(__name__)


def cause() -> BaseException | None:
    """Returns the exception with which the main thread has ended: an uncaught error, or a `SystemExit` of any code.

    None if it has ended without an exception, or is still running.
    """
    return _exits[-1] if _exits else getattr(sys, "last_value", None)


def at_end(call: Callable[[BaseException], object]) -> None:
    """Registers a function to be called with `cause()` when the main thread has ended with an exception.

    It is called after Python has printed the exception, and before Python waits for threads and exit handlers.
    """
    watch()
    _calls.append(call)


@functools.cache
def watch() -> None:
    """Starts to record the exit status; to be called early: `sys.exit(main())` looks up `sys.exit` before it calls `main`."""
    sys.exit = _replaced(sys.exit)
    # These modules register a wait for the threads of executors; functions registered later run before it.
    for module in ("concurrent.futures.thread", "concurrent.futures.process"):
        importlib.import_module(module)
    with contextlib.suppress(RuntimeError):  # this process is ending already
        threading._register_atexit(_report)  # type: ignore[attr-defined]


def _report() -> None:
    error = cause()
    if error is None:
        return
    for call in _calls:
        try:
            call(error)
        except Exception:  # it would keep Python from waiting for threads
            _log.exception("Reporting the exit status failed")


class _Exit(SystemExit):
    """The exception of `sys.exit`. Python reads its `code` to end the process, without a calling frame in the thread."""

    def _read(self) -> Any:
        if sys._getframe().f_back is None:
            _exits.append(self)
        return _CODE.__get__(self)

    def _write(self, code: Any) -> None:
        _CODE.__set__(self, code)

    code = property(_read, _write)

    def __reduce__(self) -> tuple[Any, ...]:
        return SystemExit, self.args


_CODE: Any = SystemExit.__dict__["code"]
_Exit.__name__, _Exit.__qualname__, _Exit.__module__ = "SystemExit", "SystemExit", "builtins"  # when it is printed


def _replaced(original: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    @functools.wraps(original)
    def exit(status: Any = None, /) -> NoReturn:
        try:
            original(status)
        except SystemExit as error:
            if threading.current_thread() is not threading.main_thread():
                raise  # it ends a thread silently, which `threading` does not do for a subclass
            raise _Exit(*error.args) from None

    return exit


def located(error: InputError) -> str:
    """Returns the message of an error about bad input, with the line of the program's own file that caused it."""
    frames = traceback.walk_tb(error.__traceback__)
    own_frames = [(frame, line) for frame, line in frames if frame.f_globals.get("__name__") == "__main__"]
    location = f"{own_frames[-1][0].f_code.co_filename}, line {own_frames[-1][1]}: " if own_frames else ""
    return f"{location}{error}"


def end_with_exit_codes() -> None:
    """Makes an uncaught error of tfdist end this process with one line and its exit code, if a launcher has started it.

    With it, the launcher does not restart a program that cannot succeed, and restarts one that was preempted. Other
    processes keep Python's traceback, which a program's author expects of an imported library.
    """
    if LAUNCHER_VARIABLE not in os.environ:
        return
    watch()  # a rank that fails leaves its group, see `tfdist.coordination.client`
    previous = sys.excepthook

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, TfdistError):
            previous(kind, error, trace)
            return
        _log.debug("Traceback of the error:", exc_info=error)
        message = located(error) if isinstance(error, InputError) else error
        with contextlib.suppress(OSError):  # the output is closed; the exit code still counts
            print(f"tfdist: {one_line(str(message))}", file=sys.stderr)
        raise SystemExit(int(error.exit_code))  # Python ends with this code

    sys.excepthook = end


def call_excepthook(error: BaseException) -> None:
    """Reports an error that ends this process as Python does, for code that handles it in place of Python.

    Args:
      error: the error, with the traceback that is to be printed.

    Raises:
      SystemExit: the hook has raised it, to end the process with its code.
    """
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as hook_error:
        for title, each in (("Error in sys.excepthook:", hook_error), ("\nOriginal exception was:", error)):
            print(title, file=sys.stderr)
            traceback.print_exception(each)
