"""Gram-Schmidt for a few long rows, bitwise equal on every replica."""

import numpy as np
import tensorflow as tf


def orthonormal(rows: tf.Tensor) -> tf.Tensor:
    """Returns orthonormal rows with the span of the given ones; a row that depends on previous rows becomes zero.

    Each row is projected twice, after which it is orthogonal up to rounding (Giraud et al., 2005: "twice is enough"),
    and counts as dependent if no more than 100 epsilon of it is left. Rows are scaled first, so that no square over- or
    underflows. Never fails and never returns a NaN for finite rows.

    Args:
      rows: [r, m] float32 or float64, r static and small.
    """
    smallest = 100 * np.finfo(rows.dtype.as_numpy_dtype).eps
    scaled = scaled_rows(rows)
    sizes = tf.norm(scaled, axis=1, keepdims=True)
    found: list[tf.Tensor] = []
    for k in range(rows.shape[0]):
        row = scaled[k : k + 1]
        if found:
            basis = tf.concat(found, axis=0)
            for _ in range(2):
                row -= tf.matmul(tf.matmul(row, basis, transpose_b=True), basis)
        left = tf.norm(row)
        found.append(tf.where(left > smallest * sizes[k], row / left, tf.zeros_like(row)))
    return tf.concat(found, axis=0)


def scaled_rows(rows: tf.Tensor) -> tf.Tensor:
    """Scales rows [r, m] so that their largest magnitudes are 1; zero rows stay zero."""
    return tf.math.divide_no_nan(rows, tf.reduce_max(tf.abs(rows), axis=1, keepdims=True))
