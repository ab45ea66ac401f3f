"""Evaluates searches for the learning rate, and plots searches for the learning rate and the batch size."""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfdist.errors import byte_size
from tfdist.planning.batch_size import BatchSizes
from tfdist.reporting.run_summary import describe_axes, new_figure, png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DIVERGED = 4.0  # ratio of a mean loss to the lowest one at which it has diverged, as in fastai and Lightning
_MAX_LOSS_RATIO = 2.0  # ratio of a mean loss to the first loss at which it has diverged
_WINDOW = 20.0  # the smoothing window is a twentieth of all steps
_MIN_SMOOTHING = 0.5
_MIN_DESCENT = 2.0  # minimum descent, as a multiple of the typical difference between two losses
_MIN_LOSSES = 4  # losses that are needed to compute a slope


@dataclasses.dataclass(frozen=True)
class LearningRates:
    """The result of a search for the learning rate.

    Attributes:
      rates: learning rate of each step, ascending.
      losses: loss of each step before its update.
      smoothed: the losses, capped at the first one and then smoothed; see `smooth`.
      suggestion: rate at which the smoothed loss falls fastest, with two digits; None if it never falls.
      lowest: rate with the lowest smoothed loss; None if there are no losses.
      diverged: rate at which the loss diverged; None if it did not.
      batch_size: global batch size.
    """

    rates: list[float] = dataclasses.field(repr=False)
    losses: list[float] = dataclasses.field(repr=False)
    smoothed: list[float] = dataclasses.field(repr=False)
    suggestion: float | None
    lowest: float | None
    diverged: float | None
    batch_size: int

    def describe(self) -> str:
        """Returns the result in a sentence."""
        if self.suggestion is None:
            range_text = f" between {self.rates[0]:.2g} and {self.rates[-1]:.2g}" if self.rates else ""
            return (
                f"No learning rate is suggested, because the loss does not decrease{range_text}. Try another range or more "
                "steps."
            )
        assert self.lowest is not None
        if self.diverged is None:
            end = "and does not diverge: a larger max would show where it does"
        else:
            end = f"and diverges at {self.diverged:.2g}"
        return (
            f"Suggested learning rate: {self.suggestion:g}. The loss falls fastest there; it is lowest at "
            f"{self.lowest:.2g} {end}."
        )


def rates_between(first: float, last: float, steps: int) -> list[float]:
    """Returns the rates of a search, which grow by the same factor at each step."""
    return [first * (last / first) ** (step / (steps - 1)) for step in range(steps)]


def smoothing(steps: int) -> float:
    """Returns the weight of an adjacent loss in a smoothed one, for a number of steps: 0.8 for 100 steps."""
    return max(_MIN_SMOOTHING, 1 - _WINDOW / steps)


def divergence(losses: Sequence[float], steps: int) -> int | None:
    """Returns the index of the first diverged loss; None if there is none.

    A loss has diverged if it is not finite, or if the running mean, in which each loss has `smoothing(steps)` times the weight
    of the next, is more than four times the lowest running mean, or more than twice the first loss.
    """
    weight = smoothing(steps)
    total = count = 0.0
    lowest = math.inf
    for step, loss in enumerate(losses):
        if not math.isfinite(loss):
            return step
        total, count = weight * total + loss, weight * count + 1
        mean = total / count
        lowest = min(lowest, mean)
        if lowest > 0 and (mean > DIVERGED * lowest or mean > _MAX_LOSS_RATIO * losses[0]):
            return step
    return None


def smooth(losses: Sequence[float] | np.ndarray, weight: float) -> np.ndarray:
    """Returns weighted means of losses, in which a loss d steps before or after has the weight `weight` ** d.

    A running mean over earlier losses only would lag by several steps, and move the suggestion up. The losses are
    finite, and the weight is in [0, 1).
    """
    steps = np.arange(len(losses))
    weights = weight ** np.abs(steps[:, None] - steps[None, :])
    return weights @ np.asarray(losses, np.float64) / weights.sum(1)


def learning_rates(rates: Sequence[float], losses: Sequence[float], batch_size: int) -> LearningRates:
    """Returns the result of a search, from the rates of all steps, and the losses of the completed ones.

    The suggestion is the rate of the steepest descent of the smoothed loss over the logarithm of the rate, before the lowest
    value (Smith, arXiv:1506.01186, reads it from the plot).
    """
    end = divergence(losses, len(rates))
    valid = list(losses[:end])
    # Losses above the first one would hide an earlier descent of the means.
    smoothed = smooth(np.minimum(valid, valid[0]), smoothing(len(rates))) if valid else np.zeros(0)
    lowest = int(np.argmin(smoothed)) if valid else None
    steepest = None if lowest is None else _steepest(valid[: lowest + 1], smoothed[: lowest + 1])
    return LearningRates(
        rates=list(rates[: len(valid)]),
        losses=valid,
        smoothed=smoothed.tolist(),
        suggestion=None if steepest is None else float(f"{rates[steepest]:.2g}"),
        lowest=None if lowest is None else rates[lowest],
        diverged=None if end is None else rates[end],
        batch_size=batch_size,
    )


def _steepest(losses: Sequence[float], smoothed: np.ndarray) -> int | None:
    """Returns the step of the steepest descent up to the lowest loss; None if the descent may be noise."""
    if len(losses) < _MIN_LOSSES:
        return None
    typical_difference = float(np.median(np.abs(np.diff(losses))))
    if not smoothed[0] - smoothed[-1] > _MIN_DESCENT * typical_difference:
        return None
    return int(np.argmin(np.gradient(smoothed)))


_GIB = 2**30
_LIGHT, _DARK, _MARK, _GRAY = "#7fb3d9", "#12598f", "#c55a11", "#888888"


def plot_learning_rates(result: LearningRates) -> bytes:
    """Plots the result of a search for the learning rate; returns the contents of a PNG file."""
    figure, axes = _figure(
        f"Loss by learning rate, batch size {result.batch_size}", "learning rate (logarithmic)", "loss"
    )
    axes.set_xscale("log")
    axes.plot(result.rates, result.losses, color=_LIGHT, linewidth=1.2, label="loss of each step")
    axes.plot(result.rates, result.smoothed, color=_DARK, linewidth=2.0, label="smoothed")
    if (suggestion := result.suggestion) is not None:
        index = min(range(len(result.rates)), key=lambda i: abs(math.log(result.rates[i] / suggestion)))
        label = f"suggestion: {suggestion:g}"
        axes.axvline(suggestion, color=_MARK, linewidth=1.0, linestyle="--")
        axes.plot([suggestion], [result.smoothed[index]], "o", color=_MARK, markersize=8, zorder=3, label=label)
    if result.diverged is not None:
        axes.axvline(
            result.diverged, color=_GRAY, linewidth=1.0, linestyle=":", label=f"diverged: {result.diverged:.2g}"
        )
    if result.smoothed:
        # A few large losses before the divergence would flatten the rest of the curve.
        low, high = min(result.smoothed), max(result.smoothed)
        margin = 0.15 * (high - low) or 0.1
        lowest = min([low, *(loss for loss in result.losses if loss <= high + margin)])
        axes.set_ylim(lowest - margin, high + 2 * margin)
    axes.legend(frameon=False)
    return png(figure)


def plot_batch_sizes(result: BatchSizes, title: str) -> bytes:
    """Plots speed and memory by batch size; returns the contents of a PNG file."""
    sizes = [trial.batch_size for trial in result.usable_trials]
    speeds = [trial.examples_per_second for trial in result.usable_trials]
    failed_sizes = [trial.batch_size for trial in result.trials if trial.failure]
    limit = result.memory_bytes / _GIB
    figure, speed_axes = _figure(title, "global batch size (examples)", "examples/s")
    memory_axes = speed_axes.twinx()
    speed_axes.set_xscale("log", base=2)
    speed_axes.plot(sizes, speeds, color=_DARK, linewidth=1.8, marker="o", markersize=5, label="examples/s")
    if best := result.fastest:
        label = f"fastest: {best.batch_size}"
        speed_axes.plot(
            [best.batch_size], [best.examples_per_second], "*", color=_MARK, markersize=15, zorder=3, label=label
        )
    memory = [trial.memory_bytes / _GIB for trial in result.usable_trials]
    memory_axes.plot(sizes, memory, color=_LIGHT, linewidth=1.4, marker="s", markersize=4, label="memory")
    memory_axes.axhline(
        limit, color=_GRAY, linewidth=1.0, linestyle=":", label=f"limit: {byte_size(result.memory_bytes)}"
    )
    if failed_sizes:
        memory_axes.plot(
            failed_sizes, [limit] * len(failed_sizes), "x", color=_GRAY, markersize=8, label="does not fit"
        )
    speed_axes.set_xticks([*sizes, *failed_sizes], [str(size) for size in (*sizes, *failed_sizes)], rotation=45)
    speed_axes.minorticks_off()
    memory_axes.set_ylabel("memory (GiB)")
    speed_axes.set_ylim(bottom=0)
    memory_axes.set_ylim(bottom=0)
    memory_axes.spines["top"].set_visible(False)
    handles = [handle for axes in (speed_axes, memory_axes) for handle in axes.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=5)
    return png(figure)


def _figure(title: str, horizontal: str, vertical: str) -> "tuple[Figure, Axes]":
    figure = new_figure(8, 4.8)
    axes = figure.subplots()
    describe_axes(axes, title.replace("$", r"\$"), horizontal, vertical)
    return figure, axes
