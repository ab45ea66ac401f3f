"""The model with the mean of the replicas' moving statistics, as of BatchNormalization."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import HasCollectives
from tfdist.step.temporary_values import TemporaryLocalValues
from tfdist.step.weighted_means import means_over_replicas


class AveragedStatistics(TemporaryLocalValues):
    """Context in which moving statistics are their mean over replicas; cost: one all-reduce of them, in float64."""

    def __init__(self, model: keras.Model, strategy: HasCollectives):
        """Initializes the context; compiles nothing yet.

        Args:
          model: compiled and built model.
          strategy: strategy whose replicas have the model.
        """
        super().__init__(keras_internals.moving_statistics(model), strategy)

    def average(self) -> None:
        """Replaces the statistics by their mean, for good; every process must call it."""
        if self._changes_values:
            self._take()

    @property
    def _changes_values(self) -> bool:
        """See base class."""
        return super()._changes_values and self._strategy.replicas > 1

    def _values(self, own: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See base class."""
        return means_over_replicas(own, tf.ones([]), self._strategy.collectives, name="statistics")
