"""Sums the metrics' variables over replicas since the last reset of the metrics."""

from collections.abc import Sequence
from typing import Any, Literal

import keras
import numpy as np

from tfdist import keras_internals
from tfdist.distribution.strategy import Strategy
from tfdist.step.metrics import KerasMetrics, add_sums, assign_values, check_sums, compile_read_and_reset


class MetricSums:
    """Collects the sums from the devices, and publishes them in the metrics' variables after a pass over data.

    A replica's variables contain the sums of its rows since they were last drained (read and reset). If replicas have all
    rows, the variables keep the sums since the last reset of the metrics, which a custom step may read.
    """

    def __init__(self, model: keras.Model, strategy: Strategy):
        """Collects the metrics of a compiled and built model; raises `InputError` if they cannot be summed."""
        check_sums(keras_internals.metrics_of(model))
        self._model, self._strategy = model, strategy
        self._has_all_rows = False  # whether replicas have all rows of a batch
        self._totals: list[np.ndarray] = []
        # While collecting, totals are the sums before the last reset; otherwise all sums. Published sums are in variables, too.
        self._state: Literal["collecting", "drained", "published"] = "collecting"
        self._collect()

    def _collect(self) -> None:
        self.metrics = KerasMetrics(self._model)
        self._drain = compile_read_and_reset(self.metrics, self._strategy)

    def add_new_metrics(self) -> bool:
        """Adds metrics that were created while a custom step was traced; resets all and returns True if there are any."""
        if len(KerasMetrics(self._model).variables) == len(self.metrics.variables):
            return False
        self._collect()
        self.reset()
        return True

    def use_all_rows(self, has_all_rows: bool) -> None:
        """Sets whether replicas compute all rows or their own rows; keeps the sums."""
        if has_all_rows != self._has_all_rows:
            self._totals = add_sums(self._totals, self._undrained_sums())
            self._assign(self._zeros)
            self._has_all_rows = has_all_rows

    def add(self, values: Sequence[Any]) -> None:
        """Adds sums that a step has drained."""
        self._totals = add_sums(self._totals, [np.asarray(value, np.float64) for value in values])
        self._state = "drained"

    def _sums(self) -> list[np.ndarray]:
        if self._state != "collecting":
            return self._totals
        if not self._has_all_rows:
            self._totals = add_sums(self._totals, self._drain())
            return self._totals
        return [a + b for a, b in zip(self._totals, self._undrained_sums(), strict=True)]

    def by_metric(self) -> dict[str, Any]:
        """Returns each metric's results; see `KerasMetrics.by_metric`."""
        return self.metrics.by_metric(self._sums())

    def results(self) -> dict[str, Any]:
        """Returns the metrics' results, as in Keras's logs; empty before the first sums."""
        sums = self._sums()
        return self.metrics.results(sums) if sums else {}

    def publish(self) -> None:
        """Assigns the sums to the metrics' variables on every replica, where users read results after a pass."""
        if self._state != "published":
            self._totals = self._sums()
            self._assign(self._totals)
            self._state = "published"

    def prepare_step(self) -> None:
        """Prepares the metrics' variables for a step; after `publish`, replicas with all rows keep the sums in them."""
        if self._state == "published" and self._has_all_rows:
            self._totals = self._zeros
        elif self._state == "published":
            self._assign(self._zeros)
        self._state = "collecting"

    def reset(self) -> None:
        """Resets the metrics."""
        self._assign(self._zeros)
        self._state, self._totals = "collecting", self._zeros

    def saved_totals(self) -> list[np.ndarray]:
        """Returns the totals with which `restore` restores the sums after a reset."""
        return self._sums() if self._has_all_rows else self._totals

    def restore(self, totals: list[np.ndarray]) -> None:
        """Restores the result of `saved_totals` after a reset."""
        self._totals = totals

    def _assign(self, values: Sequence[np.ndarray]) -> None:
        assign_values(self.metrics.variables, values, self._strategy)

    def _undrained_sums(self) -> list[np.ndarray]:
        if not self._has_all_rows:
            return self._drain()
        return [np.asarray(self._strategy.local(v.value)[0], np.float64) for v in self.metrics.variables]

    @property
    def _zeros(self) -> list[np.ndarray]:
        return [np.zeros(variable.shape) for variable in self.metrics.variables]
