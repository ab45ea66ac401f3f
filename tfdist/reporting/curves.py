"""Plots curves.png: loss, metrics, learning rate and replica divergence over the steps of a run."""

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING

from tfdist.coordination import Json
from tfdist.reporting.file_errors import reraise_as_write_error
from tfdist.reporting.plain_reporter import format_number
from tfdist.reporting.reporter import Reporter
from tfdist.reporting.run_summary import best_point, describe_axes, new_figure, png, set_integer_ticks, set_log_scale
from tfdist.reporting.schema import EVAL, TRAIN, as_float, main_metrics
from tfdist.storage import AnyPath, path_of, storage_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

Points = list[tuple[int, float]]

_MAX_METRICS = 4
# Narrow panels of optional curves: title and unit by the name of the field.
_NARROW_PANELS = {
    "learning_rate": ("Learning rate", "learning rate"),
    "replica_divergence": ("Replica divergence", "relative distance to the mean"),
}
# A hue for each curve: light for training, dark for evaluation (ColorBrewer's "Paired").
_COLORS = (("#7fb3d9", "#12598f"), ("#f7b267", "#c55a11"), ("#93cf86", "#2a7a2f"), ("#c3a9d6", "#5f3a8c"))
_MAX_SERVERS = 4
_WORKER_COLORS = ("#12598f", "#c55a11", "#2a7a2f", "#5f3a8c", "#7fb3d9", "#f7b267", "#93cf86", "#c3a9d6")
_TIMES = {  # label and color by name
    "compute": ("compute", "#7fb3d9"),
    "data": ("wait for data", "#93cf86"),
    "workers": ("wait for other workers", "#c55a11"),
    "pull": ("wait for pull", "#c3a9d6"),
    "push": ("wait for push", "#5f3a8c"),
}


class WorkerPanels:
    """The panels of a run's workers, from the fields `workers` and `staleness_histogram` of its training records."""

    def __init__(self) -> None:
        self._rates: dict[int, list[tuple[int, float]]] = collections.defaultdict(list)  # by worker
        self._updates: collections.Counter[int] = collections.Counter()  # by worker
        self._seconds: dict[int, dict[str, float]] = collections.defaultdict(lambda: dict.fromkeys(_TIMES, 0.0))
        self._staleness: dict[int, collections.Counter[int]] = collections.defaultdict(collections.Counter)  # by server

    def __bool__(self) -> bool:
        """Returns whether there is something to draw."""
        return bool(self._rates)

    def add(self, record: Mapping[str, Json]) -> None:
        """Adds a record."""
        for rank, worker in enumerate(record.get("workers", ())):
            self._rates[rank].append((int(record["step"]), worker["updates_per_second"]))
            self._updates[rank] += worker["updates"]
            for name, seconds in {"compute": worker["compute_seconds"], **worker["wait_seconds"]}.items():
                self._seconds[rank][name] += seconds
        for server, counts in enumerate(record.get("staleness_histogram", ())):
            self._staleness[server].update({int(age): count for age, count in counts.items()})

    def draw(self, figure: "SubFigure") -> None:
        """Draws the panels: the slowest eight workers, and the staleness on the first four servers."""
        # The seconds per update of a worker without updates are unknown.
        workers = sorted(sorted(self._rates, key=lambda rank: self._updates[rank])[: len(_WORKER_COLORS)])
        *staleness_axes, rate_axes, time_axes = figure.subplots(1, 3 if self._staleness else 2, squeeze=False)[0]
        for axes in staleness_axes:
            self._draw_staleness(axes)
        for rank, color in zip(workers, _WORKER_COLORS, strict=False):
            steps, rates = zip(*self._rates[rank], strict=True)
            marker = "o" if len(steps) == 1 else None
            rate_axes.plot(steps, rates, color=color, linewidth=1.6, marker=marker, label=f"worker {rank}")
        _describe(rate_axes, "Updates per second", "step (optimizer updates)", "updates/s")
        rate_axes.set_ylim(bottom=0.0)
        self._draw_times(time_axes, [rank for rank in workers if self._updates[rank]])

    def _draw_staleness(self, axes: "Axes") -> None:
        from matplotlib.ticker import MaxNLocator

        servers = sorted(self._staleness)[:_MAX_SERVERS]
        width = 0.9 / len(servers)
        for i, server in enumerate(servers):
            counts = self._staleness[server]
            positions = [age + (i - (len(servers) - 1) / 2) * width for age in counts]
            axes.bar(positions, list(counts.values()), width, color=_WORKER_COLORS[i], label=f"server {server}")
        _describe(axes, "Staleness", "staleness of a gradient (updates)", "updates")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    def _draw_times(self, axes: "Axes", workers: Sequence[int]) -> None:
        left = [0.0] * len(workers)
        labels = [f"worker {rank}" for rank in workers]
        for name, (label, color) in _TIMES.items():
            seconds = [1000 * self._seconds[rank][name] / self._updates[rank] for rank in workers]
            axes.barh(labels, seconds, left=left, color=color, label=label)
            left = [start + length for start, length in zip(left, seconds, strict=True)]
        _describe(axes, "Time of an update", "ms per update of the worker", "")
        axes.invert_yaxis()


def _describe(axes: "Axes", title: str, horizontal: str, vertical: str) -> None:
    describe_axes(axes, title, horizontal, vertical)
    # Below the panel, where it covers nothing.
    axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


class CurvesReporter(Reporter):
    """Plots the loss and the first four metrics, each for training and evaluation, and the learning rate.

    Runs whose replicas train locally, as with local SGD, also have a panel for their divergence; runs with parameter servers
    have a row of panels for their workers. The best evaluation of each metric is marked. The plot is updated at evaluations,
    at most once per `seconds_between`, and at the end. The file, a PNG, is replaced atomically. Without records, no file is
    written.
    """

    def __init__(
        self, path: AnyPath, title: str = "", seconds_between: float = 10.0, clock: Callable[[], float] = monotonic
    ):
        self._path = path_of(path)
        self._title = title
        self._seconds_between = seconds_between
        self._clock = clock
        self._last_draw_time = -math.inf
        self._curves: dict[str, dict[str, Points]] = {}
        self._worker_panels = WorkerPanels()
        self._has_changed = False  # since the last plot

    def record(self, record: Mapping[str, Json]) -> None:
        self.preload([record])
        if record.get("kind") == EVAL and self._clock() - self._last_draw_time >= self._seconds_between:
            self._draw()

    def preload(self, records: Iterable[Mapping[str, Json]]) -> None:
        """Adds records of earlier attempts, without plotting."""
        for record in records:
            if "step" not in record:
                continue
            kind = str(record.get("kind", TRAIN))
            self._worker_panels.add(record)
            narrow_values = {name: record[name] for name in _NARROW_PANELS if name in record}
            for name, value in {"loss": record.get("loss"), **main_metrics(record), **narrow_values}.items():
                point = as_float(value)
                if point is not None:
                    self._has_changed = True
                    self._curves.setdefault(name, {}).setdefault(kind, []).append((int(record["step"]), point))

    def close(self, outcome: str) -> None:
        if self._has_changed:
            self._draw()

    def _draw(self) -> None:
        picture = png(draw(self._curves, self._title, self._worker_panels))
        with reraise_as_write_error(self._path):
            storage_of(self._path).replace(self._path, picture)
        self._last_draw_time, self._has_changed = self._clock(), False


def draw(
    curves: Mapping[str, Mapping[str, Points]], title: str = "", worker_panels: WorkerPanels | None = None
) -> "Figure":
    """Returns the figure of a run, without using a window or matplotlib's global state.

    `curves` are (step, value) points by name (`loss`, `learning_rate`, `replica_divergence` or a metric) and by kind of record
    (`train`, `eval`); `worker_panels` are drawn below the others.
    """
    narrow_panels = [name for name in _NARROW_PANELS if name in curves]
    rows = 2 if worker_panels else 1
    figure = new_figure(11 + 3 * len(narrow_panels), 4.2 * rows)
    row, *worker_rows = figure.subfigures(rows, 1, squeeze=False)[:, 0]
    if worker_panels:
        worker_panels.draw(*worker_rows)
    loss_axes, metric_axes, *narrow_axes = row.subplots(
        1, 2 + len(narrow_panels), width_ratios=[3, 3, *[2] * len(narrow_panels)]
    )
    if title:
        figure.suptitle(title.replace("$", r"\$"), x=0.01, ha="left")
    for axes, name in zip(narrow_axes, narrow_panels, strict=True):
        _panel(axes, *_NARROW_PANELS[name], {name: curves[name]})
        axes.set_ylim(bottom=0.0)
        if legend := axes.get_legend():
            legend.remove()
    metrics = [name for name in curves if name not in ("loss", *_NARROW_PANELS)][:_MAX_METRICS]
    _panel(loss_axes, "Loss", "loss", {"loss": curves["loss"]} if "loss" in curves else {})
    unit = metrics[0].replace("$", r"\$") if len(metrics) == 1 else "value"
    _panel(metric_axes, "Metrics", unit, {name: curves[name] for name in metrics})
    loss_points = itertools.chain(*curves.get("loss", {}).values())
    set_log_scale(loss_axes, [value for _, value in loss_points if math.isfinite(value)], "loss")
    return figure


def _panel(axes: "Axes", title: str, unit: str, curves: Mapping[str, Mapping[str, Points]]) -> None:
    for (name, kinds), colors in zip(curves.items(), _COLORS, strict=False):
        for kind, color in zip((TRAIN, EVAL), colors, strict=True):
            points = kinds.get(kind)
            if not points or (best := best_point(points, name)) is None:
                continue
            steps, values = zip(*points, strict=True)
            label = (kind if len(curves) == 1 else f"{name}, {kind}").replace("$", r"\$")
            if kind == EVAL and len(points) > 1:
                axes.plot(*best, color=color, marker="*", markersize=13, linestyle="none", zorder=3)
                label += f" (best {format_number(best[1])} at step {best[0]})"
            # Evaluations are few, and a line of a single point would be invisible.
            marker = "o" if kind == EVAL or len(points) == 1 else None
            width = 1.8 if kind == EVAL else 1.4
            axes.plot(steps, values, color=color, linewidth=width, marker=marker, markersize=4, label=label)
    describe_axes(axes, title, "step (optimizer updates)", unit, is_empty=not axes.lines)
    if axes.lines:
        set_integer_ticks(axes)
        axes.legend(frameon=False)
