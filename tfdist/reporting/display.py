"""The choice of how the progress of a run is displayed: a progress bar where a person looks, lines elsewhere."""

import sys
from typing import TextIO

from rich.console import Console

from tfdist.process import terminal
from tfdist.reporting.in_place import InPlaceReporter
from tfdist.reporting.plain_reporter import PlainReporter
from tfdist.reporting.progress_bar import TerminalReporter
from tfdist.reporting.reporter import Reporter

_NOTEBOOK_COLUMNS = 100
_NOTEBOOK_SECONDS = 0.2  # every state is a message to the browser


def terminal_or_plain(stream: TextIO) -> Reporter:
    """Returns a progress bar for a terminal or a notebook, and plain lines for other streams.

    Only the stream matters: variables that request colors (`FORCE_COLOR`) do not make a pipe a terminal. A terminal
    without cursor control (`TERM=dumb` or none) gets plain lines. A pipe to a launcher that shows its output in a
    terminal gets a progress bar. In a notebook, the bar is written to stdout, because stderr has the background of an
    error there.

    Args:
      stream: usually `sys.stderr`.
    """
    if is_notebook():
        return InPlaceReporter(sys.stdout, _NOTEBOOK_COLUMNS, _NOTEBOOK_SECONDS)
    if terminal.has_cursor_control(stream):
        return TerminalReporter(Console(file=stream, force_terminal=True, force_interactive=True))
    if terminal.leads_to_launcher(stream):
        return InPlaceReporter(stream, terminal.launcher_columns())
    return PlainReporter(stream)


def is_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook, which need not have imported IPython before."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return any(base.__name__ == "ZMQInteractiveShell" for base in type(shell).__mro__)  # that of Colab derives from it
