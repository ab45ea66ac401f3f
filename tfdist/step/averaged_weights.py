"""The model with the moving average of its weights, for evaluation and export."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import HasCollectives
from tfdist.step.temporary_values import TemporaryValues
from tfdist.step.validation import inner_optimizer


class AveragedWeights(TemporaryValues):
    """Context in which the weights of a model are their moving averages; the same on every replica.

    Without an average, or before the first update, nothing changes. Moving statistics, as of BatchNorm, stay as they are:
    they are averages already.
    """

    def __init__(self, model: keras.Model, strategy: HasCollectives):
        """Initializes the context; compiles nothing yet.

        Args:
          model: compiled and built model, whose optimizer averages the weights, or does not.
          strategy: strategy whose replicas have the model.
        """
        self._optimizer = inner_optimizer(model.optimizer)
        pairs = keras_internals.weight_averages(self._optimizer)
        super().__init__([variable for variable, _ in pairs], strategy)
        self._averages = [average for _, average in pairs]

    @property
    def _changes_values(self) -> bool:
        """See base class."""
        return super()._changes_values and self._updates > 0

    @property
    def _updates(self) -> int:
        return int(self._strategy.local(keras_internals.value_of(self._optimizer.iterations))[0])

    def _values(self, own: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """See base class."""
        held = [keras_internals.value_of(average) for average in self._averages]
        # A replica that does not have an average passes the weight in its place.
        values = [mine if value is None else tf.convert_to_tensor(value) for value, mine in zip(held, own, strict=True)]
        return self._strategy.optimizer_shards.from_owners(self._variables, values, "averages")
