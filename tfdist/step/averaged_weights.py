"""The model with the moving average of its weights, for evaluation and export."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import HasCollectives
from tfdist.step.validation import inner_optimizer


class AveragedWeights:
    """Exchanges the weights of a model for their moving average, and back; the same on every replica."""

    def __init__(self, model: keras.Model, strategy: HasCollectives):
        """Initializes the exchange; compiles nothing yet.

        Args:
          model: compiled and built model, whose optimizer averages the weights, or does not.
          strategy: strategy whose replicas have the model.
        """
        self._strategy = strategy
        self._optimizer = inner_optimizer(model.optimizer)
        self._pairs = keras_internals.weight_averages(self._optimizer)
        self._take = strategy.compiled(lambda: strategy.run(self._taken))
        self._restore = strategy.compiled(lambda own: strategy.run(self._restored, own))

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which the model has the averaged weights; every process must enter it.

        Its own weights are restored bit for bit on exit; meanwhile they take memory beside the average. Without an
        average, or before the first update, nothing changes. Moving statistics, as of BatchNorm, stay as they are:
        they are averages already.
        """
        if not self._pairs or not self._updates:
            yield
            return
        own = self._take()
        try:
            yield
        finally:
            self._restore(own)

    @property
    def _updates(self) -> int:
        return int(self._strategy.local(keras_internals.value_of(self._optimizer.iterations))[0])

    def _taken(self) -> list[tf.Tensor]:
        """Assigns the averages; returns this replica's own weights. A replica function."""
        own = [tf.identity(keras_internals.value_of(variable)) for variable, _ in self._pairs]
        with tf.control_dependencies(own):
            for variable, average in self._pairs:
                value = tf.convert_to_tensor(keras_internals.value_of(average))
                keras_internals.value_of(variable).assign(self._strategy.layouts.stored(variable, value))
        return own

    def _restored(self, own: Any) -> None:
        """Assigns this replica's own weights. A replica function."""
        for (variable, _), value in zip(self._pairs, own, strict=True):
            keras_internals.value_of(variable).assign(self._strategy.layouts.stored(variable, value))
