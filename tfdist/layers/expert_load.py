"""A metric of how many tokens each expert processes."""

from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals import uncast_value


class ExpertLoad(keras.metrics.Metric):
    """Sums the tokens of each expert and the dropped choices over batches."""

    def __init__(self, experts: int, **kwargs: Any):
        """Creates the metric.

        Args:
          experts: number of experts.
          **kwargs: as for `keras.metrics.Metric`.
        """
        super().__init__(name="load", **kwargs)
        self.tokens = self.add_variable((experts,), "zeros", name="tokens")
        self.dropped = self.add_variable((), "zeros", name="dropped")

    def update_state(self, tokens: tf.Tensor, dropped: tf.Tensor) -> None:
        """Adds a batch.

        Args:
          tokens: [experts], tokens of each expert.
          dropped: scalar, choices that were dropped.
        """
        for variable, addend in ((self.tokens, tokens), (self.dropped, dropped)):
            before = uncast_value(variable)  # mixed precision would otherwise sum in 16 bits
            variable.assign(before + tf.cast(addend, before.dtype))

    def result(self) -> dict[str, tf.Tensor]:
        """Returns each expert's fraction of the tokens, their coefficient of variation, and the dropped fraction."""
        tokens, dropped = tf.convert_to_tensor(self.tokens), tf.convert_to_tensor(self.dropped)
        total = tf.reduce_sum(tokens)
        parts = tf.math.divide_no_nan(tokens, total)
        each = {f"expert_{i}": part for i, part in enumerate(tf.unstack(parts))}
        variation = tf.math.reduce_std(parts) * parts.shape[0]
        return {"load_cv": variation, "dropped": tf.math.divide_no_nan(dropped, total + dropped), **each}
