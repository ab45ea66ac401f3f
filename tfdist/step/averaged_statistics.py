"""The model with the mean of the replicas' moving statistics, as of BatchNormalization."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import HasCollectives
from tfdist.gradients import Bucketed, Sum
from tfdist.step.side_effects import MEAN_DTYPE
from tfdist.step.temporary_values import TemporaryLocalValues


class AveragedStatistics(TemporaryLocalValues):
    """Context in which moving statistics are their mean over replicas; cost: one all-reduce of them, in float64."""

    def __init__(self, model: keras.Model, strategy: HasCollectives):
        """Initializes the context; compiles nothing yet.

        Args:
          model: compiled and built model.
          strategy: strategy whose replicas have the model.
        """
        super().__init__(keras_internals.moving_statistics(model), strategy)
        self._average = tf.function(lambda: strategy.run(self._averaged), autograph=False)

    def average(self) -> None:
        """Replaces the statistics by their mean, for good; every process must call it."""
        if self._changes_values:
            self._average()

    @property
    def _changes_values(self) -> bool:
        """See base class."""
        return super()._changes_values and self._strategy.replicas > 1

    def _averaged(self) -> None:
        """Assigns the means. A replica function."""
        own = [tf.identity(variable.value) for variable in self._variables]
        for variable, mean in zip(self._variables, self._values(own), strict=True):
            variable.assign(mean)

    def _values(self, own: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See base class."""
        collectives = self._strategy.collectives
        values = [tf.cast(value, MEAN_DTYPE) for value in own]
        sums = Bucketed(Sum()).reduce(values, [], collectives, name="statistics").totals
        return [tf.cast(total / collectives.size, value.dtype) for total, value in zip(sums, own, strict=True)]
