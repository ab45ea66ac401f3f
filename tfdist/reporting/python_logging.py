"""Configures Python's logging for a rank: a log file, and selected messages on the terminal."""

import contextlib
import logging
import sys
from collections.abc import Iterator
from types import TracebackType

from tfdist.errors import TfdistError, WriteError, one_line
from tfdist.reporting.file_errors import reraise_as_write_error
from tfdist.reporting.plain_reporter import banner
from tfdist.reporting.reporter import Reporter, RunPlan
from tfdist.storage import AnyPath, StoragePath, path_of, storage_of

_log = logging.getLogger(__name__)
ONLY_IN_FILE = {"only_in_file": True}  # `extra` of messages that the terminal shows in another form
_FORMAT = "%(asctime)s %(levelname)s {name}: %(message)s"


def setup(rank: int, path: AnyPath, name: str = "") -> contextlib.ExitStack:
    """Logs to a file and to stderr until the result is closed.

    The file receives warnings of all libraries, and messages of tfdist from level INFO. Stderr receives the same on the
    chief, and warnings on other ranks. Other handlers that write to the terminal are removed until then, to avoid duplicate
    lines. An exception that ends the context is written to the file only, because it is printed on the terminal anyway:
    as one line for a `TfdistError` or an interrupt, with a traceback for other exceptions.

    The log file is created with its directory, or appended to. `name` is the name of this process in the messages, by default
    its rank; 0 is the chief. `close()` of the result restores the previous handlers.
    """
    formatter = logging.Formatter(_FORMAT.format(name=name or f"rank {rank}"))
    with reraise_as_write_error(path):
        file_path = path_of(path)
        storage_of(file_path).make_directory(file_path.parent)
        file = _File(file_path)
    terminal = _StandardError()
    terminal.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    root, tfdist = logging.getLogger(), logging.getLogger("tfdist")
    with contextlib.ExitStack() as stack:
        stack.callback(tfdist.setLevel, tfdist.level)
        for logger in (root, logging.getLogger("tensorflow")):
            for previous_handler in list(_terminal_handlers(logger)):
                logger.removeHandler(previous_handler)
                stack.callback(logger.addHandler, previous_handler)
        for handler in (file, terminal):
            handler.setFormatter(formatter)
            root.addHandler(handler)
            stack.callback(handler.close)
            stack.callback(root.removeHandler, handler)
        tfdist.setLevel(logging.INFO)
        stack.push(lambda kind, error, trace: _write_error(file, error, trace))
        return stack.pop_all()


def _write_error(file: "_File", error: BaseException | None, trace: TracebackType | None) -> None:
    if error is not None:
        text = one_line(str(error)) or type(error).__name__
        exc_info = None if isinstance(error, TfdistError | KeyboardInterrupt) else (type(error), error, trace)
        file.has_failed |= isinstance(error, WriteError)
        file.handle(logging.LogRecord("tfdist", logging.ERROR, __file__, 0, text, None, exc_info))


class LogReporter(Reporter):
    """Writes the description of a run to the log file."""

    def start(self, plan: RunPlan) -> None:
        for line in banner(plan.description):
            _log.info("%s", line, extra=ONLY_IN_FILE)


class _File(logging.Handler):
    """Writes to the log file. The first failure is printed in one line, and does not end the run."""

    def __init__(self, path: StoragePath):
        super().__init__()
        self._path, self._file = path, storage_of(path).append(path)
        self.has_failed = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._file.write(f"{self.format(record)}\n".encode(errors="backslashreplace"))
        except Exception:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.has_failed:
            self.has_failed = True
            print(f"{self._path} is incomplete from here on: {error.strerror}.", file=sys.stderr, flush=True)

    def close(self) -> None:
        super().close()
        with contextlib.suppress(OSError):  # a failure was already printed
            self._file.close()


class _StandardError(logging.StreamHandler):
    """Writes to the current `sys.stderr`, which a progress bar may replace."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        if not getattr(record, "only_in_file", False):
            super().emit(record)


def _terminal_handlers(logger: logging.Logger) -> Iterator[logging.Handler]:
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    for handler in logger.handlers:
        writer = getattr(handler, "python_handler", handler)  # absl wraps the handler
        stream = getattr(writer, "stream", None)
        if isinstance(handler, _StandardError) or (stream is not None and stream in streams):
            yield handler
