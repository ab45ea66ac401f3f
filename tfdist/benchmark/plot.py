"""Plots collectives.png: time and bus bandwidth by size, one line per operation or algorithm."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfdist.benchmark.measurement import TRAFFIC, Measured
from tfdist.grammar.all_reduce import ALGORITHMS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# One color per operation or algorithm (ColorBrewer's "Dark2"), the same in every plot.
_PALETTE = ("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#666666")
_TICKS = {
    4**i: text for i, text in zip(range(1, 16, 2), ("4", "64", "1K", "16K", "256K", "4M", "64M", "1G"), strict=True)
}


def draw(measured: Sequence[Measured]) -> "Figure":
    """Returns the figure, which has no window and does not use matplotlib's global state.

    Args:
      measured: measurements with the same strategy and dtype; at least one.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    one = measured[0]
    figure.suptitle(f"{one.strategy}, {one.replicas} replicas, {one.dtype}", x=0.01, ha="left", fontsize="medium")
    labels = ALGORITHMS if one.algorithm else TRAFFIC
    for name, colour in zip(labels, _PALETTE, strict=False):
        points = [m for m in measured if m.label == name]
        if name == "barrier":
            for point in points:
                left.axhline(point.median * 1e3, color=colour, linewidth=1.2, linestyle="--", label=name)
        elif points:
            points = sorted(points, key=lambda m: m.bytes)
            sizes = [m.bytes for m in points]
            style = {"color": colour, "linewidth": 1.6, "marker": "o", "markersize": 4, "label": name}
            left.plot(sizes, [m.median * 1e3 for m in points], **style)
            left.fill_between(
                sizes,
                [m.least * 1e3 for m in points],
                [max(m.seconds) * 1e3 for m in points],
                color=colour,
                alpha=0.15,
                linewidth=0,
            )
            right.plot(sizes, [m.bus_bandwidth / 1e9 for m in points], **style)
    left.set_yscale("log")
    title = "Time of an all-reduce" if one.algorithm else "Time of a call"
    _format_axes(left, title, "milliseconds: median, and the range of the repeats", measured)
    _format_axes(right, "Bus bandwidth", "GB/s, by the median", measured)
    right.set_ylim(bottom=0)
    left.legend(frameon=False)
    return figure


def _format_axes(axes: "Axes", title: str, unit: str, measured: Sequence[Measured]) -> None:
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel("bytes")
    axes.set_ylabel(unit)
    sizes = [m.bytes for m in measured if m.bytes] or [4]
    axes.set_xscale("log", base=2)
    shown = {size: text for size, text in _TICKS.items() if min(sizes) <= size <= max(sizes)}
    if len(shown) > 1:
        axes.set_xticks(list(shown), labels=list(shown.values()))
    axes.minorticks_off()
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
