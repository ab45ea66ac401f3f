"""Rounding to a few equally spaced levels."""

import tensorflow as tf


def rounded(y: tf.Tensor, low: int, high: int, noise: tf.Tensor | None = None) -> tf.Tensor:
    """Rounds numbers to integers and counts them from the lowest.

    Args:
      y: float32, in [low, high] but for rounding.
      low: at least -255.
      high: at most low + 255.
      noise: None to round to the nearest, even at ties; or numbers of y's shape, uniform in (-1/2, 1/2), with which each
        y is rounded up or down so that it is y on average.

    Returns:
      uint8, round(y) - low.
    """
    if noise is not None:
        y = tf.clip_by_value(y + noise, float(low), float(high))
    # In [2^23, 2^24) floats are integers, so this addition rounds, and leaves the integer in the low bits of the float.
    # A cast to an integer would be checked for what does not fit, element by element.
    integers = tf.bitcast(y + 1.5 * 2.0**23, tf.int32) - low
    return tf.cast(tf.bitwise.bitwise_and(integers, 255), tf.uint8)


def relative(x: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
    """Returns x / scales, and 0 where a scale is 0 or so small that the processor takes it for 0."""
    return x / tf.where(scales >= 2.0**-126, scales, float("inf"))
