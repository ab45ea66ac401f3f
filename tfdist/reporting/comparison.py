"""Plots the curves of several runs over each other."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfdist.reporting.run_summary import RunSummary
from tfdist.reporting.schema import EVAL, TRAIN, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# matplotlib's "tab10" without its gray, which is that of unnamed things.
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#bcbd22", "#17becf")
_STYLES = ("-", "--", ":", "-.")
_LOG_SCALE_RATIO = 100.0
AXES = {"step": "step (optimizer updates)", "epoch": "epoch", "time": "time since the first record (minutes)"}


def draw(runs: Sequence[RunSummary], metrics: Sequence[str], axis: str = "step") -> "Figure":
    """Returns the figure, which has no window and does not use matplotlib's global state.

    Each metric has a panel, and each run a color: a pale line for training, a line with markers for evaluation, and a star
    at the best one.

    Args:
      runs: runs with different names.
      metrics: names of metrics.
      axis: what is on the horizontal axis, of `AXES`.
    """
    # Imported late, because it takes 0.4 s.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(
        figsize=(max(5.5 * len(metrics), 7.5), 4.4 + 0.22 * min(len(runs), 12)), dpi=120, layout="constrained"
    )
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        _panel(panel, runs, metric, axis)
    figure.suptitle(f"Comparison of {len(runs)} runs", x=0.01, ha="left", fontweight="bold")
    handles = [Line2D([], [], **_style(place), linewidth=1.8, label=_text(run.name)) for place, run in enumerate(runs)]
    handles += [
        Line2D([], [], color="#888888", linewidth=1.2, alpha=0.45, label="training"),
        Line2D([], [], color="#888888", linewidth=1.6, marker="o", markersize=4, label="evaluation"),
        Line2D([], [], color="#888888", linewidth=0, marker="*", markersize=11, label="best evaluation"),
    ]
    figure.legend(
        handles=handles, loc="outside lower left", ncols=min(3, len(handles)), frameon=False, fontsize="small"
    )
    return figure


def _panel(axes: "Axes", runs: Sequence[RunSummary], metric: str, axis: str) -> None:
    from matplotlib.ticker import MaxNLocator

    drawn: list[float] = []
    for place, run in enumerate(runs):
        style = _style(place)
        for kind, look in (
            (TRAIN, {"linewidth": 1.2, "alpha": 0.45}),
            (EVAL, {"linewidth": 1.6, "marker": "o", "markersize": 3.5}),
        ):
            points = _points(run, metric, kind, axis)
            if points:
                axes.plot(*zip(*points, strict=True), **style, **look)
                drawn += [value for _, value in points]
        if best := run.best(metric):
            at = next(x for x, value in _points(run, metric, EVAL, axis) if value == best[1])
            axes.plot([at], [best[1]], color=style["color"], linewidth=0, marker="*", markersize=11, zorder=4)
    axes.set_title(_text(metric), loc="left")
    axes.set_xlabel(AXES[axis])
    axes.set_ylabel(_text(metric))
    if axis == "step":
        axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", steps=[1, 2, 2.5, 5, 10], integer=True))
    if drawn and min(drawn) > 0 and max(drawn) / min(drawn) > _LOG_SCALE_RATIO:
        axes.set_yscale("log")
        axes.set_ylabel(f"{_text(metric)} (logarithmic)")
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if not drawn:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "nothing to draw", transform=axes.transAxes, ha="center", va="center", color="#888888")


def _style(place: int) -> dict[str, Any]:
    """Returns color and line style of a run, by its place; different for the first 36."""
    return {
        "color": _COLORS[place % len(_COLORS)],
        "linestyle": _STYLES[place // len(_COLORS) % len(_STYLES)],
    }


def _points(run: RunSummary, metric: str, kind: str, axis: str) -> list[tuple[float, float]]:
    times = [time for record in run.records if (time := number(record.get("time"))) is not None]
    begin = min(times, default=0.0)
    found = []
    for record in run.records:
        x, value = number(record.get(axis)), number(record.get(metric))
        if record["kind"] == kind and x is not None and value is not None and math.isfinite(value):
            found.append(((x - begin) / 60 if axis == "time" else x, value))
    return found


def _text(text: str) -> str:
    """Escapes what matplotlib would take for a formula, and names that it would leave out of a legend."""
    return text.replace("$", r"\$").lstrip("_") or text
