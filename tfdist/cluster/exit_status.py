"""Exit status of this process, known once its main thread has ended, before Python waits for threads and exit handlers.

A thread that does not end, or an exit handler that waits for other processes, can keep a process from ending, which must
not hide its failure. Python calls no hook for `SystemExit`, so that its exit status is known only if it is raised by
`sys.exit`, which is replaced here. `raise SystemExit(1)` in a program is not detected.
"""

import contextlib
import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

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
