"""Rounding to a few equally spaced levels."""

import tensorflow as tf


def rounded(y: tf.Tensor, low: int, high: int, noise: tf.Tensor | None = None) -> tf.Tensor:
    """Rounds numbers to integers and subtracts the lowest.

    Args:
      y: float32, in [low, high] up to rounding.
      low: at least -255.
      high: at most low + 255.
      noise: None to round to the nearest, ties to even; or numbers of y's shape, uniform in (-1/2, 1/2), with which
        each y is rounded up or down such that the expected value is y.

    Returns:
      uint8, round(y) - low.
    """
    if noise is not None:
        y = tf.clip_by_value(y + noise, float(low), float(high))
    # In [2^23, 2^24) floats are integers, so this addition rounds, and leaves the integer in the low bits of the float.
    # A cast to an integer would check every element for overflow.
    integers = tf.bitcast(y + 1.5 * 2.0**23, tf.int32) - low
    return tf.cast(tf.bitwise.bitwise_and(integers, 255), tf.uint8)


def relative(x: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
    """Returns x / scales, or 0 where a scale is 0 or a denormal, which the processor may flush to 0."""
    return x / tf.where(scales >= 2.0**-126, scales, float("inf"))
