"""Errors of tfdist that a user's program does not catch: their locations, and the exit codes of a launcher's ranks."""

import contextlib
import logging
import os
import sys
import traceback
from types import TracebackType

from tfdist.cluster import exit_status
from tfdist.cluster.signals import LAUNCHER_VARIABLE
from tfdist.errors import InputError, TfdistError
from tfdist.errors.engine_errors import one_line

_log = logging.getLogger(__name__)


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
    exit_status.watch()  # a rank that fails leaves its group, see `tfdist.coordination.client`
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
