"""Gram-Schmidt for a few long rows, with the same bits on every replica."""

import numpy as np
import tensorflow as tf


def orthonormal(rows: tf.Tensor) -> tf.Tensor:
    """Returns orthonormal rows with the span of the given ones; one that depends on those before it becomes zero.

    Each row is projected twice, after which it is orthogonal to rounding whatever it was (Giraud et al., 2005: "twice is
    enough"), and counts as dependent where no more than 100 epsilon of it is left. Scaling comes first, so that no square
    over- or underflows. Never fails and, of finite rows, never returns a NaN.

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
    """Returns rows [r, m] whose largest elements are 1 or -1; zero rows stay zero."""
    return tf.math.divide_no_nan(rows, tf.reduce_max(tf.abs(rows), axis=1, keepdims=True))
