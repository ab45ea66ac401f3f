"""Pictures of what searches have found, without a window and without matplotlib's global state."""

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfdist.errors.byte_sizes import byte_size
from tfdist.finders.batch_size import BatchSizes
from tfdist.finders.rate_curve import LearningRates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIB = 2**30
_LIGHT, _DARK, _MARK, _GRAY = "#7fb3d9", "#12598f", "#c55a11", "#888888"


def plot_learning_rates(result: LearningRates, title: str = "") -> bytes:
    """Returns the picture of a search for the learning rate as a PNG file.

    Args:
      result: what was found.
      title: title of the picture.
    """
    figure, axes = _figure(title or f"Loss by learning rate, batch size {result.batch_size}")
    axes.set_xscale("log")
    axes.plot(result.rates, result.losses, color=_LIGHT, linewidth=1.2, label="loss of each step")
    axes.plot(result.rates, result.smoothed, color=_DARK, linewidth=2.0, label="smoothed")
    if (suggestion := result.suggestion) is not None:
        at = min(range(len(result.rates)), key=lambda i: abs(math.log(result.rates[i] / suggestion)))
        label = f"suggestion: {suggestion:g}"
        axes.axvline(suggestion, color=_MARK, linewidth=1.0, linestyle="--")
        axes.plot([suggestion], [result.smoothed[at]], "o", color=_MARK, markersize=8, zorder=3, label=label)
    if result.diverged is not None:
        axes.axvline(
            result.diverged, color=_GRAY, linewidth=1.0, linestyle=":", label=f"diverged: {result.diverged:.2g}"
        )
    if result.smoothed:
        # A few huge losses before the divergence would flatten all others.
        low, high = min(result.smoothed), max(result.smoothed)
        margin = 0.15 * (high - low) or 0.1
        axes.set_ylim(min(low, *_inside(result.losses, high + margin)) - margin, high + 2 * margin)
    axes.set_xlabel("learning rate (logarithmic)")
    axes.set_ylabel("loss")
    axes.legend(frameon=False)
    return _png(figure)


def plot_batch_sizes(result: BatchSizes, title: str) -> bytes:
    """Returns the picture of a search for the batch size as a PNG file: speed and memory by size.

    Args:
      result: what was found.
      title: title of the picture.
    """
    sizes = [trial.batch_size for trial in result.usable]
    speeds = [trial.examples_per_second for trial in result.usable]
    refused = [trial.batch_size for trial in result.trials if trial.failure]
    limit = result.memory_bytes / _GIB
    figure, left = _figure(title)
    right = left.twinx()
    left.set_xscale("log", base=2)
    left.plot(sizes, speeds, color=_DARK, linewidth=1.8, marker="o", markersize=5, label="examples/s")
    if best := result.fastest:
        label = f"fastest: {best.batch_size}"
        left.plot([best.batch_size], [best.examples_per_second], "*", color=_MARK, markersize=15, zorder=3, label=label)
    memory = [trial.memory_bytes / _GIB for trial in result.usable]
    right.plot(sizes, memory, color=_LIGHT, linewidth=1.4, marker="s", markersize=4, label="memory")
    right.axhline(limit, color=_GRAY, linewidth=1.0, linestyle=":", label=f"limit: {byte_size(result.memory_bytes)}")
    if refused:
        right.plot(refused, [limit] * len(refused), "x", color=_GRAY, markersize=8, label="does not fit")
    left.set_xticks([*sizes, *refused], [str(size) for size in (*sizes, *refused)], rotation=45)
    left.minorticks_off()
    left.set_xlabel("global batch size (examples)")
    left.set_ylabel("examples/s")
    right.set_ylabel("memory (GiB)")
    left.set_ylim(bottom=0)
    right.set_ylim(bottom=0)
    right.spines["top"].set_visible(False)
    handles = [handle for axes in (left, right) for handle in axes.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=5)
    return _png(figure)


def _inside(losses: Sequence[float], high: float) -> list[float]:
    return [loss for loss in losses if loss <= high]


def _figure(title: str) -> "tuple[Figure, Axes]":
    # Imported late, because it takes 0.4 s.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_title(title.replace("$", r"\$"), loc="left", fontweight="bold")
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: "Figure") -> bytes:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()
