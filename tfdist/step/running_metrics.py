"""Running metrics of a run since its last record and since the start of the epoch; a loss that diverges."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.step.metrics import ModelMetrics, Totals

FACTOR = 5.0  # times the initial loss
STEPS = 10  # in succession
EXAMPLES = 32  # over which the initial loss is taken, so that single examples do not matter


class Divergence:
    """Compares the loss with the initial one.

    The initial loss is the mean over the first steps that have 32 examples together: one step, unless batches are
    smaller. A loss diverges if each of 10 steps in succession has a loss of more than 5 times that. Cross-entropy begins
    near ln(classes), and no useful model stays at a multiple of it; single batches with a large loss, a warm restart or
    a noisy start do not count. Losses that begin at 0 or below are not judged.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None):
        """Begins with the first step of a run, or with what `to_json` returned."""
        saved = saved or {"initial": 0.0, "steps": 0, "above": 0, "is_over": False}
        self._initial, self._steps = float(saved["initial"]), int(saved["steps"])
        self._above, self._is_over = int(saved["above"]), bool(saved["is_over"])

    def add(self, losses: Iterable[float], batch_size: int) -> float | None:
        """Adds finite losses of steps; returns the initial loss if they diverge, once per run.

        Args:
          losses: loss of each step.
          batch_size: examples per step.
        """
        if self._is_over:
            return None
        for loss in losses:
            if self._steps * batch_size < EXAMPLES:
                self._initial = (self._initial * self._steps + float(loss)) / (self._steps + 1)
                self._steps += 1
            else:
                self._above = self._above + 1 if loss > FACTOR * self._initial else 0
                self._is_over |= self._initial <= 0 or self._above >= STEPS
        return self._initial if self._is_over and self._initial > 0 else None

    def to_json(self) -> dict[str, Any]:
        """Returns the state as JSON, for a checkpoint."""
        return {"initial": self._initial, "steps": self._steps, "above": self._above, "is_over": self._is_over}


def describe(step: int, loss: float, initial: float) -> str:
    """Returns the warning about a loss that diverges, found after step `step`."""
    return (
        f"The training loss diverges: it has been more than {FACTOR:g} times the initial {initial:.4g} for {STEPS} steps, "
        f"and is {loss:.4g} at step {step}. Lower the learning rate, or add a warmup or gradient clipping."
    )


class RunningMetrics:
    """Losses and metrics summed over several steps.

    Attributes:
      skipped: number of steps that were not finite.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None):
        """Creates empty sums, or those that `to_json` returned."""
        saved = saved or {"loss": 0.0, "counted": 0, "skipped": 0, "sums": []}
        self._loss = float(saved["loss"])
        self._counted, self.skipped = int(saved["counted"]), int(saved["skipped"])
        self._totals = Totals()
        if saved["sums"]:
            self._totals.add([_array(values) for values in saved["sums"]])

    def __bool__(self) -> bool:
        """Returns whether any step was added."""
        return bool(self._counted or self.skipped)

    def add(self, losses: np.ndarray, counted: np.ndarray, sums: Sequence[np.ndarray]) -> None:
        """Adds the steps of a call.

        Args:
          losses: [steps], their losses.
          counted: [steps] bool, whether each step was finite.
          sums: sums of the metrics' variables, merged over replicas.
        """
        for loss in losses[counted]:
            self._loss += float(loss)
        self._counted += int(counted.sum())
        self.skipped += int((~counted).sum())
        self._totals.add(sums)

    def results(self, metrics: ModelMetrics) -> dict[str, float]:
        """Returns the mean loss over the finite steps, NaN if there are none, and the metrics."""
        mean = self._loss / self._counted if self._counted else float("nan")
        return {"loss": mean, **self._totals.results(metrics)}

    def to_json(self) -> dict[str, Any]:
        """Returns all sums as JSON, without loss of precision."""
        sums = [{"shape": list(v.shape), "values": [float(x).hex() for x in v.flat]} for v in self._totals.sums]
        return {"loss": self._loss, "counted": self._counted, "skipped": self.skipped, "sums": sums}


def _array(saved: Mapping[str, Any]) -> np.ndarray:
    values = [float.fromhex(text) for text in saved["values"]]  # JSON has no inf and no NaN
    return np.asarray(values, np.float64).reshape(saved["shape"])


class Progress:
    """Running metrics of the steps since the last record and of those since the start of the epoch.

    Attributes:
      window: since the last record.
      epoch: since the start of the epoch.
      divergence: whether the loss diverges.
    """

    def __init__(self, saved: Mapping[str, Any] | None = None):
        """Creates empty sums, or those that `to_json` returned."""
        saved = saved or {"window": None, "epoch": None, "divergence": None}
        self.window, self.epoch = RunningMetrics(saved["window"]), RunningMetrics(saved["epoch"])
        self.divergence = Divergence(saved["divergence"])

    def next_run(self) -> "Progress":
        """Returns empty sums for a run that continues training, whose initial loss is that of the first run."""
        progress = Progress()
        progress.divergence = self.divergence
        return progress

    def add(self, losses: np.ndarray, counted: np.ndarray, sums: Sequence[np.ndarray]) -> None:
        """Adds the steps of a call to both; see `RunningMetrics.add`."""
        for running_metrics in (self.window, self.epoch):
            running_metrics.add(losses, counted, sums)

    def to_json(self) -> dict[str, Any]:
        """Returns all of it as JSON, for checkpoints."""
        return {
            "window": self.window.to_json(),
            "epoch": self.epoch.to_json(),
            "divergence": self.divergence.to_json(),
        }
