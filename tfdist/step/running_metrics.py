"""Running metrics of a run since its last record and since the start of the epoch; part of a checkpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.step.divergence import Divergence
from tfdist.step.metrics import ModelMetrics, Totals


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
        found = Progress()
        found.divergence = self.divergence
        return found

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
