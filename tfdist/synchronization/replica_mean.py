"""The model with the mean of the replicas' weights, for evaluation and export between exchanges."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist.distribution.strategy import HasCollectives
from tfdist.step.temporary_values import TemporaryLocalValues
from tfdist.synchronization.exchange import weighted_mean


class ReplicaMean(TemporaryLocalValues):
    """Context in which variables have their mean over the replicas; cost: one all-reduce of them."""

    def __init__(self, variables: Sequence[keras.Variable], strategy: HasCollectives, rows: Callable[[], tf.Tensor]):
        """Initializes the context; compiles nothing yet.

        Args:
          variables: variables of which each replica has its own value.
          strategy: strategy of the replicas.
          rows: replica function that returns a scalar, the replica's weight in the mean; if all are zero, weights are
            equal.
        """
        super().__init__(variables, strategy)
        self._rows = rows

    @property
    def _changes_values(self) -> bool:
        """See base class."""
        return super()._changes_values and self._strategy.replicas > 1

    def _values(self, own: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See base class."""
        collectives = self._strategy.collectives
        mine = tf.cast(self._rows(), keras.config.floatx())
        [total] = collectives.all_reduce([mine], name="replica_mean/rows")
        rows = tf.where(total > 0, mine / tf.maximum(total, 1), 1 / self._strategy.replicas)
        return weighted_mean(own, rows, tf.ones_like(rows), collectives)
