"""The display of a run's progress: a progress bar on terminals and in notebooks, lines elsewhere."""

import abc
import collections
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic
from typing import NamedTuple, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from tfdist.cluster import terminal
from tfdist.coordination import Json
from tfdist.reporting.curves import CurvesReporter
from tfdist.reporting.plain_reporter import (
    PlainReporter,
    banner,
    communication,
    format_number,
    line,
    loss_and_metrics,
    printable,
    workers,
)
from tfdist.reporting.python_logging import LogReporter
from tfdist.reporting.reporter import MetricsFile, MultiReporter, OutcomeFile, Reporter, RunPlan
from tfdist.reporting.run_directory import RunDirectory
from tfdist.reporting.schema import EVAL, as_float
from tfdist.reporting.tensorboard import TensorBoardReporter

_MIN_BAR_COLUMNS = 6
_SPEED_SECONDS = 30.0  # time over which the speed is measured
# Contents of a line, in order of preference: its fields, whether they are long, and whether there is a bar.
_LEVELS = (
    ("epoch step time loss metric speed communication workers", True, True),
    ("epoch step time loss metric speed communication workers", False, True),
    ("epoch step time loss metric speed", True, True),
    ("epoch step time loss metric speed", False, True),
    ("epoch step time loss metric speed", False, False),
    ("epoch step time loss speed", False, True),
    ("epoch step time loss speed", False, False),
    ("epoch step time loss", False, False),
    ("step time loss", False, False),
    ("step loss", False, False),
    ("step", False, False),
)
_FIELDS_AFTER_BAR = ("time", "loss", "metric", "speed", "communication", "workers", "status")
_NOTEBOOK_COLUMNS = 100
_NOTEBOOK_SECONDS = 0.2  # each draw is a message to the browser


class Line(NamedTuple):
    """A line of a progress bar."""

    left: str  # text before the bar
    filled: int  # filled columns of the bar
    empty: int  # empty columns of the bar; there is no bar if both are 0
    right: str  # text after the bar

    def __str__(self) -> str:
        """Returns the line without colors; only the filled part of the bar is visible."""
        bar = "━" * self.filled + " " * self.empty
        return " ".join(part for part in (self.left, bar, self.right) if part)


class BarText:
    """Describes the state of a run in one line that fits the width of a terminal."""

    def __init__(self, plan: RunPlan, clock: Callable[[], float]):
        self._plan, self._clock = plan, clock
        self._start_time = clock()
        self._step = plan.first_step
        self._record: Mapping[str, Json] = {}
        # Does not include the first call, which compiles the training step.
        self._points: collections.deque[tuple[float, int]] = collections.deque()
        self.status = ""  # shown instead of loss and metrics, unless it is empty
        self._width, self._level = 0, 0

    def update(self, step: int, record: Mapping[str, Json]) -> None:
        """Sets the current step, and the latest loss and metrics."""
        now = self._clock()
        self._step, self._record = step, {**self._record, **record}
        if not self._points or step > self._points[-1][1]:
            self._points.append((now, step))
        while len(self._points) > 2 and self._points[1][0] < now - _SPEED_SECONDS:
            self._points.popleft()

    def line(self, width: int) -> Line:
        """Returns the line for a terminal of `width` columns.

        Omitted fields stay omitted until the width changes, to avoid flickering.
        """
        if width != self._width:
            self._width, self._level = width, 0
        if self.status:
            return self._fit(["epoch", "step", "status"], True, True, width) or Line("", 0, 0, self.status[:width])
        while self._level < len(_LEVELS):
            names, is_long, has_bar = _LEVELS[self._level]
            line = self._fit(names.split(), is_long, has_bar, width)
            if line:
                return line
            self._level += 1
        return Line(self._field("step", is_long=False)[:width], 0, 0, "")

    def _fit(self, names: list[str], is_long: bool, has_bar: bool, width: int) -> Line | None:
        separator = "  " if is_long else " "
        texts = {name: text for name in names if (text := self._field(name, is_long))}
        if "workers" in names and not is_long and "workers" not in texts:  # the next level has all fields, and is long
            return None
        left = separator.join(text for name, text in texts.items() if name not in _FIELDS_AFTER_BAR)
        right = separator.join(text for name, text in texts.items() if name in _FIELDS_AFTER_BAR)
        if not has_bar:
            line = Line(left, 0, 0, right)
            return line if len(str(line)) <= width else None
        room = width - len(left) - len(right) - sum(1 for text in (left, right) if text)
        if room < _MIN_BAR_COLUMNS:
            return None
        filled = room * self._step // max(self._plan.total_steps, 1)
        return Line(left, min(filled, room), max(room - filled, 0), right)

    def _field(self, name: str, is_long: bool) -> str:
        plan, step = self._plan, self._step
        match name:
            case "epoch":
                return plan.epoch_text(step)
            case "step":
                return f"{'step ' if is_long else ''}{step}/{plan.total_steps}"
            case "time":
                return self._times(is_long)
            case "loss":
                return next(loss_and_metrics(self._record, max_metrics=0), "")
            case "metric":
                texts = [*loss_and_metrics(self._record, max_metrics=1)]
                return texts[-1] if len(texts) > ("loss" in self._record) else ""
            case "speed":
                unit = "examples/s" if is_long else "ex/s"
                speed = as_float(self._record.get("examples_per_second")) or self._speed * plan.batch_size
                return f"{format_number(speed)} {unit}" if speed else ""
            case "communication":
                return "  ".join(communication(self._record)) if plan.shows_communication else ""
            case "workers":
                return " ".join(workers(self._record, is_long))
        return self.status

    @property
    def _speed(self) -> float:
        """Steps per second of wall time, including evaluations; 0 if unknown."""
        if len(self._points) < 2:
            return 0.0
        (first_time, first), (last_time, last) = self._points[0], self._points[-1]
        return (last - first) / (last_time - first_time) if last_time > first_time else 0.0

    def _times(self, is_long: bool) -> str:
        elapsed_time = clock_time(self._clock() - self._start_time)
        remaining_time = clock_time((self._plan.total_steps - self._step) / self._speed) if self._speed else "-:--"
        return f"{elapsed_time}, {remaining_time} left" if is_long else f"{elapsed_time}<{remaining_time}"


def clock_time(seconds: float) -> str:
    """Formats a time as `0:07`, `12:34` or `1:02:03`."""
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


class BarReporter(Reporter, abc.ABC):
    """Displays a progress bar: epoch, steps, elapsed and remaining time, loss, first metric, and examples/s.

    Narrow terminals show fewer fields; see `BarText`. The description of the run and evaluations are printed as lines above
    the bar, and the outcome below it. The bar is drawn by the caller's thread, at intervals of at least `seconds`.
    """

    def __init__(self, seconds: float = 0.1, clock: Callable[[], float] = monotonic):
        self._seconds, self._clock = seconds, clock
        self._plan: RunPlan | None = None
        self._text: BarText | None = None
        self._last_draw_time = clock()

    @abc.abstractmethod
    def _print(self, text: str) -> None:
        """Prints a permanent line, above the bar if it is open."""

    def _open_bar(self) -> None:
        """Opens the bar at the start of a run."""

    @abc.abstractmethod
    def _draw_bar(self, text: BarText) -> None:
        """Draws the open bar."""

    @abc.abstractmethod
    def _close_bar(self) -> None:
        """Closes the bar; its last state stays visible."""

    def start(self, plan: RunPlan) -> None:
        for row in banner(plan.description):
            self._print(row)
        self._plan, self._text = plan, BarText(plan, self._clock)
        self._open_bar()
        self._draw()

    @contextlib.contextmanager
    def busy(self, task: str) -> Iterator[None]:
        self._set_status(f"{task} ...")
        yield
        self._set_status("")

    def progress(self, step: int, record: Mapping[str, float]) -> None:
        if self._text is not None:
            self._text.update(step, record)
        if self._clock() - self._last_draw_time >= self._seconds:
            self._draw()

    def record(self, record: Mapping[str, Json]) -> None:
        if record.get("kind") == EVAL or self._text is None:
            self._print(line(record, self._plan))
        elif "step" in record:
            self._text.update(int(record["step"]), record)
        self._draw()

    def close(self, outcome: str) -> None:
        if self._text is not None:
            self._set_status("")
            self._close_bar()
            self._text = None
        if outcome:
            self._print(f"run ended: {printable(outcome)}")

    def _set_status(self, text: str) -> None:
        if self._text is not None:
            self._text.status = printable(text)
            self._draw()

    def _draw(self) -> None:
        if self._text is not None:
            self._draw_bar(self._text)
            self._last_draw_time = self._clock()


class InPlaceReporter(BarReporter):
    """Displays a progress bar with a carriage return as the only control character, in lines of `width` columns.

    The carriage return follows each state of the bar; log messages replace the bar until the next state. The stream is
    flushed after each write, but not closed.
    """

    def __init__(self, stream: TextIO, width: int, seconds: float = 0.1, clock: Callable[[], float] = monotonic):
        super().__init__(seconds, clock)
        self._stream, self._width = stream, width
        self._columns = 0  # of the visible state

    def _print(self, text: str) -> None:
        self._write(text.ljust(self._columns) + "\n")
        self._columns = 0

    def _draw_bar(self, text: BarText) -> None:
        state = str(text.line(self._width))
        self._write(state.ljust(self._columns) + "\r")  # covers the visible state
        self._columns = len(state)

    def _close_bar(self) -> None:
        self._write("\n")
        self._columns = 0

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class TerminalReporter(BarReporter):
    """Displays a progress bar on a terminal. Other output to the terminal appears above it."""

    _live: Live

    def __init__(self, console: Console, clock: Callable[[], float] = monotonic):
        super().__init__(clock=clock)
        self._console = console

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _open_bar(self) -> None:
        self._live = Live(
            console=self._console,
            auto_refresh=False,
            # Streams that the user has redirected must not be captured.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def _draw_bar(self, text: BarText) -> None:
        self._live.update(self._style_line(text), refresh=True)

    def _close_bar(self) -> None:
        self._live.stop()

    def _style_line(self, text: BarText) -> Text:
        line = text.line(self._console.width)
        has_colors = self._console.color_system is not None and not self._console.no_color
        if not has_colors or not line.filled + line.empty:
            return Text(str(line), no_wrap=True)
        bar = ("━" * line.filled, "bar.complete"), ("━" * line.empty, "bar.back")
        return Text.assemble(f"{line.left} ", *bar, f" {line.right}", no_wrap=True)


def terminal_or_plain(stream: TextIO) -> Reporter:
    """Returns a progress bar for a terminal or a notebook, and plain lines for other streams, usually `sys.stderr`.

    Variables that request colors (`FORCE_COLOR`) do not turn a pipe into a terminal. A terminal without cursor control
    (`TERM=dumb` or none) gets plain lines. A pipe to a launcher that runs in a terminal gets a progress bar. In a notebook,
    the bar is written to stdout, because stderr is highlighted as an error there.
    """
    if is_notebook():
        return InPlaceReporter(sys.stdout, _NOTEBOOK_COLUMNS, _NOTEBOOK_SECONDS)
    if terminal.has_cursor_control(stream):
        return TerminalReporter(Console(file=stream, force_terminal=True, force_interactive=True))
    if terminal.is_launcher_pipe(stream):
        return InPlaceReporter(stream, terminal.launcher_columns())
    return PlainReporter(stream)


def is_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return any(base.__name__ == "ZMQInteractiveShell" for base in type(shell).__mro__)  # also the base class of Colab's


def chief_reporter(
    directory: RunDirectory,
    stream: TextIO,
    earlier_records: Sequence[Mapping[str, Json]] = (),
    loggers: Sequence[Reporter] | None = None,
) -> Reporter:
    """Returns the chief's reporter, which writes to a stream for the user and to the files of the run directory.

    `earlier_records` are from before the run was resumed, for curves.png. `loggers` are further reporters, see
    `make_loggers`; by default, TensorBoard.
    """
    curves = CurvesReporter(directory.curves, directory.path.name)
    curves.preload(earlier_records)
    return MultiReporter(
        [
            MetricsFile(directory.metrics),  # first, to store records even if another reporter fails
            OutcomeFile(directory.outcome),
            LogReporter(),
            *([TensorBoardReporter(directory.tensorboard)] if loggers is None else loggers),
            curves,
            terminal_or_plain(stream),
        ]
    )
