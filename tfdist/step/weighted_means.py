"""Means of what replicas or micro-steps have computed from their rows, such as moving statistics.

They are computed in float64: means of equal numbers, such as counters of steps, are exact, and those of the lowest float32
are finite.
"""

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.gradients import Bucketed, Sum

MEAN_DTYPE = tf.float64


def weighted_terms(values: Sequence[tf.Tensor | keras.Variable], weight: tf.Tensor) -> list[tf.Tensor]:
    """Returns what is summed to compute weighted means: each value times its weight, and the weight, of `MEAN_DTYPE`.

    Args:
      values: tensors or variables of floating dtypes.
      weight: scalar, such as a number of rows; with weight zero, values may be NaN.
    """
    weight = tf.cast(weight, MEAN_DTYPE)
    return [*(tf.math.multiply_no_nan(tf.cast(value, MEAN_DTYPE), weight) for value in values), weight]


def means_of(sums: Sequence[tf.Tensor], values: Sequence[tf.Tensor | keras.Variable]) -> list[tf.Tensor]:
    """Returns the means, of the dtypes of the values; the values themselves if all weights are zero.

    Args:
      sums: sums of all `weighted_terms`.
      values: what the caller has computed itself.
    """
    *totals, weight = sums
    means = []
    for total, value in zip(totals, values, strict=True):
        has_mean = tf.broadcast_to(weight > 0, value.shape)  # a scalar condition would crash DTensor
        mean = tf.cast(tf.math.divide_no_nan(total, weight), value.dtype)
        means.append(tf.where(has_mean, mean, tf.convert_to_tensor(value)))
    return means


def means_over_replicas(
    values: Sequence[tf.Tensor | keras.Variable], weight: tf.Tensor, collectives: Collectives, *, name: str
) -> list[tf.Tensor]:
    """Returns the weighted means over replicas, as `means_of`; in a replica function.

    Cost: one all-reduce of the values and a scalar, in float64.

    Args:
      values: see `weighted_terms`.
      weight: see `weighted_terms`.
      collectives: collectives of the replicas.
      name: name of the all-reduce.
    """
    if not values:
        return []
    terms = weighted_terms(values, weight)
    return means_of(Bucketed(Sum()).reduce(terms, [], collectives, name=name).totals, values)
