"""Sums metrics since the last record and since the start of the epoch, and detects a diverging loss."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.step.metrics import ModelMetrics, add_sums

FACTOR = 5.0  # multiple of the initial loss above which the loss of a step is too high
STEPS = 10  # number of consecutive steps with such a loss after which training diverges
Sums = Sequence[np.ndarray]  # sums of the metrics' variables, merged over replicas
EXAMPLES = 32  # number of examples over which the initial loss is averaged


@dataclasses.dataclass
class Divergence:
    """Compares the loss with the initial loss.

    The initial loss is the mean over the first steps with 32 examples in total: one step, unless batches are smaller. The
    loss diverges if it is more than 5 times the initial loss in 10 consecutive steps. Cross-entropy begins near ln(classes),
    and no useful model stays at a multiple of it. Single batches with a large loss, a warm restart or a noisy start are
    ignored. Losses that begin at 0 or below are not checked.
    """

    initial: float = 0.0  # mean loss of the first steps
    steps: int = 0  # number of steps in `initial`
    above: int = 0  # number of consecutive steps up to now whose loss is too high
    is_over: bool = False  # whether losses are no longer compared

    def add(self, losses: Iterable[float], batch_size: int) -> float | None:
        """Adds finite losses of steps with this batch size; returns the initial loss when the loss diverges, once per run."""
        if self.is_over:
            return None
        for loss in losses:
            if self.steps * batch_size < EXAMPLES:
                self.initial = (self.initial * self.steps + float(loss)) / (self.steps + 1)
                self.steps += 1
            else:
                self.above = self.above + 1 if loss > FACTOR * self.initial else 0
                self.is_over |= self.initial <= 0 or self.above >= STEPS
        return self.initial if self.is_over and self.initial > 0 else None


def describe(step: int, loss: float, initial: float) -> str:
    """Returns the warning about a diverging loss after step `step`."""
    return (
        f"The training loss diverges: it has been more than {FACTOR:g} times the initial loss of {initial:.4g} for {STEPS} "
        f"steps, and is {loss:.4g} at step {step}. Lower the learning rate, or add a warmup or gradient clipping."
    )


class RunningMetrics:
    """Losses and metrics summed over several steps."""

    def __init__(self, state: Mapping[str, Any] | None = None):
        """Creates empty sums, or restores them from a result of `to_json`."""
        state = state or {"loss": 0.0, "counted": 0, "skipped": 0, "sums": []}
        self._loss = float(state["loss"])
        self._finite_steps, self.skipped = int(state["counted"]), int(state["skipped"])  # steps
        # Empty if no step was added. Hexadecimal in JSON, which has neither inf nor NaN.
        self.sums: Sums = [np.reshape([float.fromhex(x) for x in v["values"]], v["shape"]) for v in state["sums"]]

    def __bool__(self) -> bool:
        return bool(self._finite_steps or self.skipped)

    def add(self, losses: np.ndarray, is_finite: np.ndarray, sums: Sums, kept: Collection[int] = ()) -> None:
        """Adds the steps of a call: losses [steps], bool [steps], and sums of metrics; see `add_sums` for `kept`."""
        for loss in losses[is_finite]:
            self._loss += float(loss)
        self._finite_steps += int(is_finite.sum())
        self.skipped += int((~is_finite).sum())
        self.sums = add_sums(self.sums, sums, kept)

    def results(self, metrics: ModelMetrics) -> dict[str, float]:
        """Returns the metrics, and the mean loss over the steps with a finite loss, NaN if there are none."""
        mean = self._loss / self._finite_steps if self._finite_steps else float("nan")
        return {"loss": mean, **(metrics.results(self.sums) if self.sums else {})}

    def to_json(self) -> dict[str, Any]:
        """Returns all sums as JSON, without loss of precision."""
        sums = [{"shape": list(v.shape), "values": [float(x).hex() for x in v.flat]} for v in self.sums]
        return {"loss": self._loss, "counted": self._finite_steps, "skipped": self.skipped, "sums": sums}


class Progress:
    """Running metrics since the last record, `window`, and since the start of the `epoch`."""

    def __init__(self, state: Mapping[str, Any] | None = None):
        """Creates empty sums, or restores them from a result of `to_json`."""
        state = state or {"window": None, "epoch": None, "divergence": None}
        self.window, self.epoch = RunningMetrics(state["window"]), RunningMetrics(state["epoch"])
        self.divergence = Divergence(**state["divergence"] or {})

    def next_run(self) -> "Progress":
        """Returns empty sums, with the initial loss of the first run, for a run that continues training."""
        progress = Progress()
        progress.divergence = self.divergence
        return progress

    def add(self, losses: np.ndarray, is_finite: np.ndarray, sums: Sums, kept: Collection[int] = ()) -> None:
        """Adds the steps of a call; see `RunningMetrics.add`."""
        for running_metrics in (self.window, self.epoch):
            running_metrics.add(losses, is_finite, sums, kept)

    def to_json(self) -> dict[str, Any]:
        """Returns the state as JSON, for checkpoints."""
        divergence = dataclasses.asdict(self.divergence)
        return {"window": self.window.to_json(), "epoch": self.epoch.to_json(), "divergence": divergence}
