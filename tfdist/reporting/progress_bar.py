"""A progress bar for terminals."""

import sys
from collections.abc import Callable
from time import monotonic

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tfdist.reporting.bar_reporter import BarReporter
from tfdist.reporting.bar_text import BarText


class TerminalReporter(BarReporter):
    """Displays a progress bar on a terminal. What the process prints or logs to a terminal appears above it.

    Args:
      console: where to draw.
      clock: monotonic clock in seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = monotonic):
        super().__init__(clock=clock)
        self._console = console
        self._live: Live | None = None

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _open_bar(self) -> None:
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            # A stream that is not a terminal has been redirected by the user, and must not be captured.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def _draw_bar(self, text: BarText) -> None:
        if self._live is not None:
            self._live.update(self._styled(text), refresh=True)

    def _close_bar(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _styled(self, text: BarText) -> Text:
        line = text.line(self._console.width)
        has_colors = self._console.color_system is not None and not self._console.no_color
        if not has_colors or not line.filled + line.empty:
            return Text(str(line), no_wrap=True)
        bar = ("━" * line.filled, "bar.complete"), ("━" * line.empty, "bar.back")
        return Text.assemble(f"{line.left} ", *bar, f" {line.right}", no_wrap=True)
