"""A progress bar for terminals, and the choice between it and plain lines."""

import sys
from collections.abc import Callable, Mapping
from time import monotonic
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from tfdist.coordination import Json
from tfdist.reporting.plain_reporter import PlainReporter, communication, line, loss_and_metrics, printable, rounded
from tfdist.reporting.reporter import Reporter, RunPlan
from tfdist.reporting.schema import EVAL

# The caller draws, so that rich needs no thread during training.
_SECONDS_BETWEEN_DRAWS = 0.1
# Columns other than steps and values: a bar of 6, speed of 16, time of 11, and separators.
_OTHERS = 6 + 16 + 11 + 5


def terminal_or_plain(stream: TextIO) -> Reporter:
    """Returns a progress bar for a terminal, and plain lines for other streams.

    Only the stream matters: variables that request colors (`FORCE_COLOR`) do not make a pipe a terminal. A terminal
    without cursor control (`TERM=dumb`) gets plain lines.

    Args:
      stream: usually `sys.stderr`.
    """
    console = Console(file=stream)
    return TerminalReporter(console) if stream.isatty() and console.is_interactive else PlainReporter(stream)


class TerminalReporter(Reporter):
    """Displays a progress bar: steps, examples/s, loss, first metric, communication, and remaining time.

    In a narrow terminal, the last ones of loss, metric and communication are omitted. Evaluations remain as lines above
    the bar, and the outcome as a line below it. Meanwhile, what the process prints or logs to a terminal also appears
    above the bar.

    Args:
      console: where to draw.
      clock: monotonic clock in seconds.
    """

    def __init__(self, console: Console, clock: Callable[[], float] = monotonic):
        self._console = console
        self._clock = clock
        self._plan: RunPlan | None = None
        self._bar: Progress | None = None
        self._drawn = 0.0

    def start(self, plan: RunPlan) -> None:
        """See base class."""
        self._plan = plan
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None),
            _ExamplesPerSecond(plan.batch_size),
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            TextColumn("eta"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            auto_refresh=False,
            # A stream that is not a terminal has been redirected by the user, and must not be captured.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
            get_time=self._clock,
            expand=True,
        )
        self._bar.add_task("", total=plan.total_steps, completed=plan.first_step)
        self._bar.start()
        self._draw()

    def progress(self, step: int, record: Mapping[str, float]) -> None:
        """See base class."""
        self._update(step, record)
        if self._clock() - self._drawn >= _SECONDS_BETWEEN_DRAWS:
            self._draw()

    def record(self, record: Mapping[str, Json]) -> None:
        """See base class."""
        if record.get("kind") == EVAL or self._bar is None:
            self._print(line(record, self._plan))
        elif "step" in record:
            self._update(int(record["step"]), record)
        self._draw()

    def close(self, outcome: str) -> None:
        """See base class."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if outcome:
            self._print(f"run ended: {printable(outcome)}")

    def _update(self, step: int, record: Mapping[str, Json]) -> None:
        if self._bar is not None:
            task = self._bar.tasks[0]
            room = self._console.width - _OTHERS - len(f"step {task.total:.0f}/{task.total:.0f}")
            values = escape(_fitting([*loss_and_metrics(record, most=1), *communication(record)], room))
            self._bar.update(task.id, completed=step, description=values or task.description)

    def _draw(self) -> None:
        if self._bar is not None:
            self._bar.refresh()
            self._drawn = self._clock()

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _fitting(values: list[str], room: int) -> str:
    """Joins as many values as fit into `room` columns, but at least the first."""
    while len(values) > 1 and len("  ".join(values)) > room:
        values = values[:-1]
    return "  ".join(values)


class _ExamplesPerSecond(ProgressColumn):
    """Displays the bar's speed in examples, over its last half minute."""

    def __init__(self, batch_size: int):
        super().__init__(table_column=Column(no_wrap=True))
        self._batch_size = batch_size

    def render(self, task: Task) -> Text:
        """See base class."""
        speed = task.speed
        shown = "" if speed is None else f"{rounded(speed * self._batch_size)} examples/s"
        return Text(shown, style="progress.data.speed")
