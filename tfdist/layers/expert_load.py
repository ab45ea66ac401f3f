"""How many tokens each expert computes."""

from typing import Any

import keras
import tensorflow as tf

from tfdist.keras_internals import uncast_value


class ExpertLoad(keras.metrics.Metric):
    """Sums over batches: the tokens of each expert, and the choices that were dropped."""

    def __init__(self, experts: int, **kwargs: Any):
        """Args: experts: how many there are."""
        super().__init__(name="load", **kwargs)
        self.tokens = self.add_variable((experts,), "zeros", name="tokens")
        self.dropped = self.add_variable((), "zeros", name="dropped")

    def update_state(self, tokens: tf.Tensor, dropped: tf.Tensor) -> None:
        """Adds a batch: tokens, [experts], and a scalar."""
        for variable, addend in ((self.tokens, tokens), (self.dropped, dropped)):
            before = uncast_value(variable)  # a layer of mixed precision would add up in 16 bits
            variable.assign(before + tf.cast(addend, before.dtype))

    def result(self) -> dict[str, tf.Tensor]:
        """Parts of the tokens by expert, their coefficient of variation, and the part of the choices that was dropped."""
        tokens, dropped = tf.convert_to_tensor(self.tokens), tf.convert_to_tensor(self.dropped)
        total = tf.reduce_sum(tokens)
        parts = tf.math.divide_no_nan(tokens, total)
        each = {f"expert_{i}": part for i, part in enumerate(tf.unstack(parts))}
        variation = tf.math.reduce_std(parts) * parts.shape[0]
        return {"load_cv": variation, "dropped": tf.math.divide_no_nan(dropped, total + dropped), **each}
