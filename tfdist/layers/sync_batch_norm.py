"""Batch normalization with the statistics of the global batch."""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import collectives


@keras.saving.register_keras_serializable(package="tfdist")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    r"""`keras.layers.BatchNormalization` over the rows of all replicas, under every strategy with collectives.

    Each replica computes the count, the mean and the sum of squared differences M2 of its rows, and merges the results of
    all replicas (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
    1979):

        mean = sum_r n_r mean_r / sum_r n_r
        M2 = sum_r (M2_r + n_r (mean_r - mean)^2)

    Keras's `synchronized=True` computes E[x^2] - E[x]^2, which loses precision if the mean is large compared with the
    standard deviation. Gradients flow through the merge. Cost for C channels and N replicas: an all-gather of 2 C + 1
    elements in the forward pass, and a reduce-scatter of N (2 C + 1) elements in the backward pass.

    The arguments are those of `keras.layers.BatchNormalization` except `synchronized` and `renorm`.
    """

    def __init__(self, **kwargs: Any):
        for name in ("synchronized", "renorm"):
            if kwargs.pop(name, False):
                raise ValueError(f"SyncBatchNormalization has no `{name}`. Received: {name}=True.")
        super().__init__(**kwargs)

    def get_config(self) -> dict[str, Any]:
        excluded_keys = ("synchronized", "renorm", "renorm_clipping", "renorm_momentum")
        return {key: value for key, value in super().get_config().items() if key not in excluded_keys}

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        count, mean, m2 = _statistics(inputs, mask, self._reduction_axes)
        channels = mean.shape[0]
        local_moments = tf.concat([tf.expand_dims(count, 0), mean, m2], axis=0)
        all_moments = collectives.all_gather(collectives.current(), local_moments, name=f"{self.path}/moments")
        counts, means, m2s = tf.split(all_moments, [1, channels, channels], axis=1)
        total = tf.reduce_sum(counts)
        mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, axis=0), total)
        m2 = tf.reduce_sum(m2s + counts * tf.square(means - mean), axis=0)
        return mean, tf.math.divide_no_nan(m2, total)


def synchronize(layer: keras.layers.BatchNormalization) -> None:
    """Makes a layer normalize over the rows of all replicas, like `SyncBatchNormalization`, without changing its class."""
    layer.__dict__["_moments"] = functools.partial(SyncBatchNormalization._moments, layer)  # bypasses Keras's tracking


def synchronize_layers(layers: Sequence[keras.Layer], *, include_all: bool = False) -> None:
    """Applies `synchronize` to Keras's batch normalization layers with `synchronized=True` or, if `include_all`, to all."""
    for layer in layers:
        if type(layer) is keras.layers.BatchNormalization and (include_all or layer.synchronized):
            synchronize(layer)


def is_synchronized(layer: keras.Layer) -> bool:
    """Returns whether a layer normalizes over the rows of all replicas."""
    return isinstance(layer, SyncBatchNormalization) or "_moments" in layer.__dict__


def _statistics(inputs: tf.Tensor, mask: tf.Tensor | None, axes: list[int]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the count and, per channel, the mean and sum of squared differences of a replica's rows; there may be none."""
    if mask is None:
        weights = tf.ones([1] * inputs.shape.rank, inputs.dtype)
        count = tf.cast(tf.reduce_prod([tf.shape(inputs)[axis] for axis in axes]), inputs.dtype)
    else:
        entries = tf.concat([tf.shape(inputs)[:-1], [1]], axis=0)
        weights = tf.broadcast_to(tf.cast(mask, inputs.dtype)[..., None], entries)
        count = tf.reduce_sum(weights)
    mean = tf.math.divide_no_nan(tf.reduce_sum(inputs * weights, axis=axes, keepdims=True), count)
    return count, tf.reshape(mean, [-1]), tf.reduce_sum(tf.square(inputs - mean) * weights, axis=axes)
