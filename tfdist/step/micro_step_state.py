"""State of a user's layers over the micro-steps of a step: what replicas that compute these rows would have together."""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import HasCollectives
from tfdist.pipelining.has_stages import HasStages
from tfdist.step.side_effects import assign, in_full_precision


class MicroStepState:
    """State that each micro-step begins as it was before the step, and of which a step leaves the mean, weighted by rows.

    So a counter of steps counts a step once, and a moving mean moves once, however many micro-steps there are. Integers, which
    must not depend on rows, are those of the last micro-step. The methods are called in replica functions.
    """

    def __init__(self, model: keras.Model, strategy: HasCollectives):
        """Collects the variables.

        Args:
          model: compiled and built model.
          strategy: strategy of the replicas.
        """
        state = [] if isinstance(strategy, HasStages) else keras_internals.own_state(model)
        is_floating = [tf.as_dtype(variable.dtype).is_floating for variable in state]
        self._strategy = strategy
        self._means = [variable for variable, is_mean in zip(state, is_floating, strict=True) if is_mean]
        self._others = [variable for variable, is_mean in zip(state, is_floating, strict=True) if not is_mean]
        self._before: list[list[tf.Tensor]] = [[], []]

    def specs(self) -> list[tf.TensorSpec]:
        """Returns shapes and dtypes of what `end` returns."""
        specs = [tf.TensorSpec(v.shape, in_full_precision(v)) for v in self._means]
        return [*specs, tf.TensorSpec([], tf.float64)] if specs else []

    def begin(self) -> None:
        """Notes the state before the first micro-step."""
        self._before = [[tf.identity(v) for v in variables] for variables in (self._means, self._others)]

    def restore(self) -> None:
        """Sets the state to that before the step, when a micro-step begins."""
        means, others = self._before
        assign(self._means, means)
        with self._strategy.own_copies(self._others):
            assign(self._others, others)

    def end(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns what `assign` takes, to be summed over micro-steps, when a micro-step of this number of rows ends."""
        values = [tf.cast(variable, in_full_precision(variable)) for variable in self._means]
        found = [value * tf.cast(rows, value.dtype) for value in values]
        return [*found, tf.cast(rows, tf.float64)] if found else []

    def assign(self, sums: Sequence[tf.Tensor]) -> None:
        """Assigns the means, after the last micro-step."""
        for variable, total in zip(self._means, sums[:-1], strict=True):
            mean = tf.math.divide_no_nan(total, tf.cast(sums[-1], total.dtype))
            variable.assign(tf.cast(mean, variable.dtype))
