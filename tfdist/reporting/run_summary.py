"""Summarizes runs from the files of their directories, and compares them in tables and figures."""

import dataclasses
import datetime
import io
import itertools
import math
import re
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.errors import InputError, count_of
from tfdist.reporting.plain_reporter import format_number, text_table
from tfdist.reporting.run_directory import RunDirectory, flag_values
from tfdist.reporting.schema import EVAL, TRAIN, as_float, main_metrics
from tfdist.storage import StoragePath, storage_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_LOCK = "lock"
# As in Keras's callbacks, the direction of a metric is derived from its name.
_HIGHER_IS_BETTER = re.compile(
    r"acc|auc|precision|recall|(^|_)f(1|beta|measure)|iou|(^|_)r2|cosine_similarity|top_?k|bleu|dice|hit"
)
FINISHED, RUNNING, KILLED = "finished", "running", "killed"
_IGNORED_FLAGS = ("output_dir",)
_FIRST_FLAGS = ("strategy", "model", "dataset")
UNKNOWN = "-"
_NAMES = ("run", "model", "dataset")  # columns whose text may be long
_SHORT_LENGTH = 20
_MIN_LENGTH = 12
# matplotlib's "tab10" without its gray, which is used in the legend.
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf")
_STYLES = ("-", "--", ":", "-.")
_LINE_STYLES: dict[str, dict[str, Any]] = {
    TRAIN: {"linewidth": 1.2, "alpha": 0.45},
    EVAL: {"linewidth": 1.6, "marker": "o", "markersize": 3.5},
}
_LOG_SCALE_RATIO = 100.0
AXES = {"step": "step (optimizer updates)", "epoch": "epoch", "time": "time since the first record (minutes)"}


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """A summary of the files of a run."""

    name: str  # path of the run's directory, relative to the directory that the user passed
    directory: RunDirectory
    flags: Mapping[str, str]  # flags of the last attempt, as text by name
    versions: Mapping[str, str]  # versions of packages, by name
    strategy: str  # empty if unknown
    replicas: int | None  # None if unknown
    servers: int  # number of parameter servers
    start_time: float  # time of the first attempt, in seconds since 1970 (UTC)
    starts: int  # number of attempts
    seconds: float | None  # wall time of all attempts; None if unknown
    steps: int  # number of updates, according to the records
    total_steps: int | None  # step at which the run ends, according to its flags; None if unknown
    status: str  # finished, running, killed, or another outcome: interrupted, preempted, failed, loss not finite, ...
    records: Sequence[Mapping[str, Any]]  # including the evaluator's, in the schema of metrics.jsonl

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics of evaluations, or of training if there are none, with the loss first."""
        records = self.evaluations or self.records
        return list(dict.fromkeys(name for record in records for name in ("loss", *main_metrics(record))))

    @property
    def evaluations(self) -> list[Mapping[str, Any]]:
        """Records of evaluations."""
        return [record for record in self.records if record["kind"] == EVAL]

    def last(self, metric: str) -> float | None:
        """Returns the last evaluated value of a metric; None if there is none."""
        points = _points(self.evaluations, metric)
        return points[-1][1] if points else None

    def best(self, metric: str) -> tuple[int, float] | None:
        """Returns the step and the value of the best evaluation; None if there is none."""
        return best_evaluation(self.evaluations, metric)


def best_evaluation(evaluations: Sequence[Mapping[str, Any]], metric: str) -> tuple[int, float] | None:
    """Returns the step and the value of the best of the records of evaluations; None if there is none."""
    return best_point(_points(evaluations, metric), metric)


def best_point(points: Iterable[tuple[int, float]], metric: str) -> tuple[int, float] | None:
    """Returns the best finite value of a metric and its step, the earliest of several; None if there is none."""
    finite_points = [(step, value) for step, value in points if math.isfinite(value)]
    best = max if is_higher_better(metric) else min
    return best(finite_points, key=lambda point: point[1], default=None)


def _points(records: Sequence[Mapping[str, Any]], metric: str) -> list[tuple[int, float]]:
    return [(record["step"], value) for record in records if (value := as_float(record.get(metric))) is not None]


def is_higher_better(metric: str) -> bool:
    """Returns whether higher values of a metric are better, by its name, as in Keras's callbacks."""
    return metric != "loss" and "loss" not in metric and _HIGHER_IS_BETTER.search(metric.lower()) is not None


def read_run(path: StoragePath, name: str) -> RunSummary:
    """Reads the files of a run's directory, without changing anything; raises `InputError` if it has no run."""
    directory = RunDirectory(path)
    if not directory.is_run:
        raise InputError("it is not the directory of a run")
    starts = directory.read_starts()
    if not starts:
        raise InputError("its starts.jsonl is empty")
    last, records = starts[-1], directory.all_records()
    outcome = directory.outcome_record
    flags = flag_values(last.get("flags", []))
    steps, total = max([last["step"], *(record["step"] for record in records)]), _total_steps(flags, last)
    try:
        times = [datetime.datetime.fromisoformat(start["started"]).timestamp() for start in starts]
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"its starts.jsonl is not that of a run: {error!r}") from error
    return RunSummary(
        name=name,
        directory=directory,
        flags=flags,
        versions=last.get("versions", {}),
        strategy=str(last.get("strategy") or flags.get("strategy", "")),
        replicas=last.get("replicas"),
        servers=last.get("servers", 0),
        start_time=times[0],
        starts=len(starts),
        seconds=_seconds(times, [*records, outcome]),
        steps=steps,
        total_steps=total,
        status=_status(directory, str(outcome.get("outcome", ""))),
        records=records,
    )


def _status(directory: RunDirectory, outcome: str) -> str:
    if _is_locked(directory):
        return RUNNING
    if outcome == "done" or directory.end_record:
        return FINISHED
    return outcome or KILLED


def _is_locked(directory: RunDirectory) -> bool:
    """Returns whether a process is writing to the directory.

    A process clears the lock file when it releases the lock, so the lock is tried only if the file is not empty, which may
    be because the process was killed.
    """
    path = directory.path / _LOCK
    storage = storage_of(path)
    try:
        if not storage.exists(path) or not storage.read(path).strip():
            return False
        with storage.lock(path):
            return False
    except OSError:  # another process has the lock, or this user may not lock the file, which is not empty
        return True


def _seconds(starts: Sequence[float], records: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns the total time from each start to the last record before the next start."""
    times = [time for record in records if (time := as_float(record.get("time"))) is not None and math.isfinite(time)]
    total = 0.0
    for start, end in itertools.pairwise([*starts, math.inf]):
        total += max([time for time in times if start <= time < end], default=start) - start
    return total or None


def _total_steps(flags: Mapping[str, str], start: Mapping[str, Any]) -> int | None:
    try:
        steps, epochs = int(flags.get("steps", 0)), int(flags.get("epochs", 0))
        batch_size, examples = int(start["batch_size"]), int(start["examples"])
        return steps or math.ceil(epochs * examples / batch_size) or None
    except (LookupError, TypeError, ValueError, ArithmeticError):
        return None


def columns(metric: str) -> dict[str, Callable[[RunSummary], str]]:
    """Returns the columns of the table: by title, a function that returns the cell of a run.

    `metric` is shown next to the loss.
    """
    metric_names = [name for name in dict.fromkeys(("loss", metric)) if name]
    values = {
        title: cell for name in metric_names for title, cell in ((name, _last(name)), (f"best {name}", _best(name)))
    }
    return {
        "run": lambda run: run.name,
        "started": lambda run: format_time(run.start_time),
        "strategy": _strategy_text,
        "model": lambda run: run.flags.get("model", UNKNOWN),
        "dataset": lambda run: run.flags.get("dataset", UNKNOWN),
        "steps": lambda run: f"{run.steps}{'' if run.total_steps is None else f'/{run.total_steps}'}",
        "status": lambda run: run.status,
        **values,
        "time": lambda run: duration(run.seconds),
    }


def _strategy_text(run: RunSummary) -> str:
    replicas = "" if run.replicas is None else f" x{run.replicas}"
    servers = f", {count_of(run.servers, 'server')}" if run.servers else ""
    return f"{run.strategy or UNKNOWN}{replicas}{servers}"


def _last(metric: str) -> Callable[[RunSummary], str]:
    return lambda run: UNKNOWN if (value := run.last(metric)) is None else format_number(value)


def _best(metric: str) -> Callable[[RunSummary], str]:
    return lambda run: UNKNOWN if (best := run.best(metric)) is None else f"{format_number(best[1])} @{best[0]}"


def table(runs: Sequence[RunSummary], metric: str, width: int | None = None) -> list[str]:
    """Returns the lines of a table of runs, and a note about omitted columns.

    `metric` is shown next to the loss. `width` is the number of columns of the terminal, None for no limit.
    """
    cells = {title: [cell(run) for run in runs] for title, cell in columns(metric).items()}
    if width is None or _width(cells) <= width:
        return _lines(cells)
    for title in _NAMES:
        cells[title] = [abbreviate(cell, _SHORT_LENGTH) for cell in cells[title]]
    omitted_titles = []
    for title in ("started", "loss", metric, "best loss", "time", "strategy", "model"):
        if title in cells and _width(cells) > width:
            omitted_titles.append(title)
            del cells[title]
    note = f"Omitted in {width} columns: {', '.join(omitted_titles)}. A wider terminal, a pipe or --json shows all."
    return [*_lines(cells), *(textwrap.wrap(note, width) if omitted_titles else [])]


def _width(cells: Mapping[str, Sequence[str]]) -> int:
    return max(map(len, _lines(cells)))


def _lines(cells: Mapping[str, Sequence[str]]) -> list[str]:
    return text_table([list(cells), *map(list, zip(*cells.values(), strict=True))])


def abbreviate(text: str, length: int) -> str:
    """Shortens a text to `length` characters, at least 3, by replacing its middle, as in `csv:/data...e.csv`."""
    tail = (length - 3) // 2
    return text if len(text) <= length else f"{text[: length - 3 - tail]}...{text[len(text) - tail :]}"


def fit_rows(rows: Sequence[Sequence[str]], width: int | None) -> list[list[str]]:
    """Abbreviates all cells except the first of each row to fit `width` columns; None for no limit."""
    if width is None:
        return [list(row) for row in rows]
    count, first = len(rows[0]) - 1, max(len(row[0]) for row in rows)
    length = max((width - first) // count - 2, _MIN_LENGTH)
    return [[row[0], *(abbreviate(cell, length) for cell in row[1:])] for row in rows]


def differences(runs: Sequence[RunSummary]) -> list[list[str]]:
    """Returns rows of flags and versions that differ: the name, and the value in each run."""
    rows = []
    for kind, values_of in (("", lambda run: run.flags), ("version of ", lambda run: run.versions)):
        names = sorted({name for run in runs for name in values_of(run)} - set(_IGNORED_FLAGS))
        for name in sorted(names, key=lambda name: name not in _FIRST_FLAGS):
            values = [values_of(run).get(name, UNKNOWN) for run in runs]
            if len(set(values)) > 1:
                rows.append([f"{kind}{name}", *(value or '""' for value in values)])
    replicas = [UNKNOWN if run.replicas is None else str(run.replicas) for run in runs]
    return rows if len(set(replicas)) == 1 else [*rows, ["number of replicas", *replicas]]


def results(runs: Sequence[RunSummary]) -> list[list[str]]:
    """Returns rows of results: the best and the last value of each metric, steps, status and time of each run."""
    metrics = list(dict.fromkeys(name for run in runs for name in run.metrics))
    return [
        *([f"best {name}", *map(_best(name), runs)] for name in metrics),
        *([f"last {name}", *map(_last(name), runs)] for name in metrics),
        *([title, *(columns("")[title](run) for run in runs)] for title in ("steps", "status", "time", "started")),
    ]


def duration(seconds: float | None) -> str:
    """Formats a duration: `12 s`, `3 min 20 s`, `5 h 01 min`, `3 d 04 h`."""
    if seconds is None:
        return UNKNOWN
    rounded_seconds = round(seconds)
    for unit, smaller_unit, size, part in (("d", "h", 86400, 3600), ("h", "min", 3600, 60), ("min", "s", 60, 1)):
        if rounded_seconds >= size:
            return f"{rounded_seconds // size} {unit} {rounded_seconds % size // part:02} {smaller_unit}"
    return f"{rounded_seconds} s" if rounded_seconds >= 10 else f"{seconds:.1f} s"


def format_time(seconds: float) -> str:
    """Formats a time in the local time zone."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def as_json(run: RunSummary) -> Mapping[str, Any]:
    """Returns a summary as JSON values."""
    best = {name: evaluation for name in run.metrics if (evaluation := run.best(name))}
    return {
        "run": run.name,
        "path": str(run.directory.path),
        "started_unix_seconds": run.start_time,
        "starts": run.starts,
        "wall_seconds": run.seconds,
        "strategy": run.strategy,
        "replicas": run.replicas,
        "servers": run.servers,
        "steps": run.steps,
        "total_steps": run.total_steps,
        "status": run.status,
        "last": {name: run.last(name) for name in run.metrics},
        "best": {name: {"step": step, "value": value} for name, (step, value) in best.items()},
        "flags": dict(run.flags),
        "versions": dict(run.versions),
    }


def draw(runs: Sequence[RunSummary], metrics: Sequence[str], axis: str = "step") -> "Figure":
    """Returns the figure, without using a window or matplotlib's global state.

    Each metric has a panel and each run has a color: a pale line for training, a line with markers for evaluation, and a
    star for the best evaluation. The names of the runs differ. `axis`, a key of `AXES`, is the horizontal axis.
    """
    from matplotlib.lines import Line2D

    figure = new_figure(max(5.5 * len(metrics), 7.5), 4.4 + 0.22 * min(len(runs), 12))
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        _panel(panel, runs, metric, axis)
    figure.suptitle(f"Comparison of {len(runs)} runs", x=0.01, ha="left", fontweight="bold")
    handles = [Line2D([], [], **_style(index), linewidth=1.8, label=_text(run.name)) for index, run in enumerate(runs)]
    handles += [
        Line2D([], [], color="#888888", linewidth=1.2, alpha=0.45, label="training"),
        Line2D([], [], color="#888888", linewidth=1.6, marker="o", markersize=4, label="evaluation"),
        Line2D([], [], color="#888888", linewidth=0, marker="*", markersize=11, label="best evaluation"),
    ]
    figure.legend(handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize="small")
    return figure


def new_figure(width: float, height: float) -> "Figure":
    """Returns an empty figure with a size in inches, without using a window or matplotlib's global state."""
    from matplotlib.figure import Figure  # imported late, because it takes 0.4 s

    return Figure(figsize=(width, height), dpi=120, layout="constrained")


def png(figure: "Figure") -> bytes:
    """Returns the contents of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def describe_axes(axes: "Axes", title: str, horizontal: str, vertical: str, *, is_empty: bool = False) -> None:
    """Sets the title and the labels of a panel, and the style that all figures share."""
    if is_empty:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "nothing to draw", transform=axes.transAxes, ha="center", va="center", color="#888888")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set(xlabel=horizontal, ylabel=vertical)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def set_integer_ticks(axes: "Axes") -> None:
    """Sets the ticks of a horizontal axis of steps."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 2.5, 5, 10], integer=True))


def set_log_scale(axes: "Axes", values: Sequence[float], label: str) -> None:
    """Makes the vertical axis logarithmic if the finite `values` on it span two decades."""
    if values and min(values) > 0 and max(values) / min(values) > _LOG_SCALE_RATIO:
        axes.set_yscale("log")
        axes.set_ylabel(f"{label} (logarithmic)")


def _panel(axes: "Axes", runs: Sequence[RunSummary], metric: str, axis: str) -> None:
    values: list[float] = []
    for index, run in enumerate(runs):
        style = _style(index)
        for kind, line_style in _LINE_STYLES.items():
            points = _curve_points(run, metric, kind, axis)
            if points:
                axes.plot(*zip(*points, strict=True), **style, **line_style)
                values += [value for _, value in points]
        if best := run.best(metric):
            best_x = next(x for x, value in _curve_points(run, metric, EVAL, axis) if value == best[1])
            axes.plot([best_x], [best[1]], color=style["color"], linewidth=0, marker="*", markersize=11, zorder=4)
    describe_axes(axes, _text(metric), AXES[axis], _text(metric), is_empty=not values)
    if axis == "step" and values:
        set_integer_ticks(axes)
    set_log_scale(axes, values, _text(metric))


def _style(index: int) -> dict[str, Any]:
    """Returns the color and line style of a run by its index; the first 36 are distinct."""
    return {"color": _COLORS[index % len(_COLORS)], "linestyle": _STYLES[index // len(_COLORS) % len(_STYLES)]}


def _curve_points(run: RunSummary, metric: str, kind: str, axis: str) -> list[tuple[float, float]]:
    times = [time for record in run.records if (time := as_float(record.get("time"))) is not None]
    start_time = min(times, default=0.0)
    points = []
    for record in run.records:
        x, value = as_float(record.get(axis)), as_float(record.get(metric))
        if record["kind"] == kind and x is not None and value is not None and math.isfinite(value):
            points.append(((x - start_time) / 60 if axis == "time" else x, value))
    return points


def _text(text: str) -> str:
    """Escapes formulas, and names that matplotlib would omit from a legend."""
    return text.replace("$", r"\$").lstrip("_") or text
