"""The model with the mean of the replicas' weights, for evaluation and export between exchanges."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.distribution.strategy import HasCollectives
from tfdist.synchronization.exchange import weighted_mean


class AveragedCopy:
    """Exchanges the replicas' values of variables for their mean, and back."""

    def __init__(self, variables: Sequence[keras.Variable], strategy: HasCollectives, rows: Callable[[], tf.Tensor]):
        """Initializes the exchange; compiles nothing yet.

        Args:
          variables: variables of which each replica has its own value.
          strategy: strategy of the replicas.
          rows: replica function that returns a scalar, the replica's weight in the mean; if all are zero, weights are
            equal.
        """
        self._variables, self._strategy, self._rows = list(variables), strategy, rows
        self._take = strategy.compiled(lambda: strategy.run(self._taken))
        self._restore = strategy.compiled(lambda own: strategy.run(self._restored, own))

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which all replicas have the mean; their own values are restored bit for bit on exit.

        Every process must enter it; cost: one all-reduce of the variables, and memory for a copy of them.
        """
        if self._changes_nothing:
            yield
            return
        own = self._take()
        try:
            yield
        finally:
            self._restore(own)

    @property
    def _changes_nothing(self) -> bool:
        return not self._variables or self._strategy.replicas == 1

    def _taken(self) -> list[tf.Tensor]:
        """Assigns the values to evaluate; returns this replica's own ones. A replica function."""
        own = [tf.identity(variable.value) for variable in self._variables]
        values = self._values(own)
        with tf.control_dependencies(own), self._strategy.own_copies(self._variables):
            for variable, value in zip(self._variables, values, strict=True):
                variable.assign(value)
        return own

    def _values(self, own: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the means. A replica function."""
        collectives = self._strategy.collectives
        mine = tf.cast(self._rows(), keras.config.floatx())
        [total] = collectives.all_reduce([mine], name="averaged_copy/rows")
        rows = tf.where(total > 0, mine / tf.maximum(total, 1), 1 / self._strategy.replicas)
        return weighted_mean(self._variables, rows, tf.ones_like(rows), collectives)

    def _restored(self, own: Any) -> None:
        """Assigns this replica's own values. A replica function."""
        with self._strategy.own_copies(self._variables):
            for variable, value in zip(self._variables, own, strict=True):
                variable.assign(value)
