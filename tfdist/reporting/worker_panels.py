"""Panels of curves.png about the workers of parameter servers: staleness, updates per second, and times."""

import collections
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tfdist.coordination import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

_MAX_WORKERS, _MAX_SERVERS = 8, 4
_COLORS = ("#12598f", "#c55a11", "#2a7a2f", "#5f3a8c", "#7fb3d9", "#f7b267", "#93cf86", "#c3a9d6")
_TIMES = {  # label and color by name
    "compute": ("compute", "#7fb3d9"),
    "data": ("wait for data", "#93cf86"),
    "workers": ("wait for other workers", "#c55a11"),
    "pull": ("wait for pull", "#c3a9d6"),
    "push": ("wait for push", "#5f3a8c"),
}


class WorkerPanels:
    """The panels of a run, from the fields `workers` and `staleness_histogram` of its training records."""

    def __init__(self) -> None:
        """Starts without records."""
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
        # Of a worker that makes no updates, the seconds per update are unknown.
        workers = sorted(sorted(self._rates, key=lambda rank: self._updates[rank])[:_MAX_WORKERS])
        *staleness_axes, rate_axes, time_axes = figure.subplots(1, 3 if self._staleness else 2, squeeze=False)[0]
        for axes in staleness_axes:
            self._draw_staleness(axes)
        for rank, color in zip(workers, _COLORS, strict=False):
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
            axes.bar(positions, list(counts.values()), width, color=_COLORS[i], label=f"server {server}")
        _describe(axes, "Staleness", "age of the weights of a gradient (updates)", "updates")
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
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set(xlabel=horizontal, ylabel=vertical)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    # Below the panel, where it covers nothing.
    axes.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)
