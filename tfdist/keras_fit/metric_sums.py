"""The sums of metrics' variables over replicas since their last reset."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import numpy as np

from tfdist import keras_internals
from tfdist.distribution.strategy import Strategy
from tfdist.step.metrics import KerasMetrics, Totals, check_sums, make_drain


class MetricSums:
    """Collects the sums from the devices, and publishes them in the metrics' variables after a pass over data.

    Each replica's variables have the sums of its own rows since they were last drained. Where replicas have all rows, they
    keep all sums, which a custom step may read.

    Attributes:
      metrics: the model's metrics.
    """

    def __init__(self, model: keras.Model, strategy: Strategy):
        """Finds the metrics.

        Args:
          model: compiled and built model.
          strategy: strategy on which it runs.

        Raises:
          InputError: the variables of a metric cannot be summed over replicas.
        """
        check_sums(keras_internals.metrics_of(model))
        self._model, self._strategy = model, strategy
        self._by_all_rows = False  # whether replicas have all rows of a batch
        self._totals = Totals()
        # The totals have all sums, or all but those since variables were drained; "published" also in the metrics' variables.
        self._state: Literal["collecting", "drained", "published"] = "collecting"
        self._collect()

    def _collect(self) -> None:
        self.metrics = KerasMetrics(self._model)
        self._drain = make_drain(self.metrics, self._strategy)
        self._assign = _assigning(self.metrics.variables, self._strategy)

    def add_created(self) -> bool:
        """Finds metrics that tracing a custom step has created; resets all and returns True if there are any."""
        if len(KerasMetrics(self._model).variables) == len(self.metrics.variables):
            return False
        self._collect()
        self.reset()
        return True

    def use_all_rows(self, by_all_rows: bool) -> None:
        """Switches replicas to all rows or to their own; keeps the sums so far."""
        if by_all_rows != self._by_all_rows:
            self._totals.add(self._since_drained())
            self._assign(self._zeros)
            self._by_all_rows = by_all_rows

    def add(self, values: Sequence[Any]) -> None:
        """Adds the sums that a step has drained itself."""
        self._totals.add([np.asarray(value, np.float64) for value in values])
        self._state = "drained"

    def _sums(self) -> list[np.ndarray]:
        if self._state != "collecting":
            return self._totals.sums
        if not self._by_all_rows:
            self._totals.add(self._drain())
            return self._totals.sums
        return [before + since for before, since in zip(self._totals.sums, self._since_drained(), strict=True)]

    def by_metric(self) -> dict[str, Any]:
        """Returns each metric's results; see `KerasMetrics.by_metric`."""
        return self.metrics.by_metric(self._sums())

    def results(self) -> dict[str, Any]:
        """Returns the metrics' results, as in Keras's logs; empty before the first sums."""
        sums = self._sums()
        return self.metrics.results(sums) if sums else {}

    def publish(self) -> None:
        """Assigns the sums to the metrics' variables on every replica, from which users get results after a pass."""
        if self._state != "published":
            sums = self._sums()
            self._totals = Totals(sums)
            self._assign(sums)
            self._state = "published"

    def prepare_step(self) -> None:
        """Prepares the metrics' variables for a step after `publish`; replicas with all rows keep the sums."""
        if self._state == "published" and self._by_all_rows:
            self._totals = Totals(self._zeros)
        elif self._state == "published":
            self._assign(self._zeros)
        self._state = "collecting"

    def reset(self) -> None:
        """Resets the metrics."""
        self._assign(self._zeros)
        self._state, self._totals = "collecting", Totals(self._zeros)

    def so_far(self) -> Totals:
        """Returns what `restore` takes to restore the sums after a reset."""
        return Totals(self._sums()) if self._by_all_rows else self._totals

    def restore(self, totals: Totals) -> None:
        """Restores the sums that `so_far` has returned, after a reset."""
        self._totals = totals

    def _since_drained(self) -> list[np.ndarray]:
        if not self._by_all_rows:
            return self._drain()
        return [np.asarray(self._strategy.local(v.value)[0], np.float64) for v in self.metrics.variables]

    @property
    def _zeros(self) -> list[np.ndarray]:
        return [np.zeros(variable.shape) for variable in self.metrics.variables]


def _assigning(variables: Sequence[keras.Variable], strategy: Strategy) -> Callable[[Sequence[np.ndarray]], None]:
    """Returns a function that assigns values to variables, the same on every replica."""

    def assign(values: Sequence[np.ndarray]) -> None:
        for variable, value in zip(variables, values, strict=True):
            strategy.blocks.assign_value(keras_internals.value_of(variable), per_replica=True, value=np.asarray(value))

    return assign
