"""The choice of how the progress of a run is displayed: a progress bar where a person looks, lines elsewhere."""

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console

from tfdist.process import launcher_terminal
from tfdist.reporting.in_place import InPlaceReporter
from tfdist.reporting.plain_reporter import PlainReporter
from tfdist.reporting.reporter import Reporter
from tfdist.reporting.terminal import TerminalReporter

_NOTEBOOK_COLUMNS = 100
_NOTEBOOK_SECONDS = 0.2  # every state is a message to the browser


def terminal_or_plain(stream: TextIO) -> Reporter:
    """Returns a progress bar for a terminal or a notebook, and plain lines for other streams.

    Only the stream matters: variables that request colors (`FORCE_COLOR`) do not make a pipe a terminal. A terminal
    without cursor control (`TERM=dumb`) gets plain lines. A pipe to a launcher that shows its output in a terminal gets a
    progress bar. In a notebook, the bar is written to stdout, because stderr has the background of an error there.

    Args:
      stream: usually `sys.stderr`.
    """
    if is_notebook():
        return InPlaceReporter(sys.stdout, _NOTEBOOK_COLUMNS, _NOTEBOOK_SECONDS)
    console = Console(file=stream)
    if launcher_terminal.is_terminal(stream) and console.is_interactive:
        return TerminalReporter(console)
    columns = launcher_terminal.columns()
    return InPlaceReporter(stream, columns) if columns and _is_pipe(stream) else PlainReporter(stream)


def is_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook, which need not have imported IPython before."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return any(base.__name__ == "ZMQInteractiveShell" for base in type(shell).__mro__)  # that of Colab derives from it


def is_watched(stream: TextIO) -> bool:
    """Returns whether text on a stream can be overwritten, because it ends in a terminal."""
    if launcher_terminal.is_terminal(stream):
        return Console(file=stream).is_interactive
    return bool(launcher_terminal.columns()) and _is_pipe(stream)


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Context in which a text is shown on stderr, if that is a terminal."""
    stream = sys.stderr
    is_shown = is_watched(stream)
    if is_shown:
        stream.write(text)
        stream.flush()
    try:
        yield
    finally:
        if is_shown:
            stream.write(f"\r{' ' * len(text)}\r")
            stream.flush()


def _is_pipe(stream: TextIO) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)
    except (AttributeError, OSError, ValueError):  # no stream, or one without a file
        return False
