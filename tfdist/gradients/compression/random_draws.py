"""Draws random numbers and signs, rounds, and orthonormalizes, with equal results on every replica."""

from typing import Any

import numpy as np
import tensorflow as tf

# Counter-based random numbers: stateless, and cheap enough to draw one per element of a gradient.
# The hash is two rounds of shift, xor and multiply (Wellons's lowbias32), vectorized by XLA. 8 M numbers take 2 ms;
# TensorFlow's stateless generators take 37 ms. For rounding, not for cryptography.
#
# Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011.


def rounding_noise(seed: tf.Tensor, size: int, start: int = 0) -> tf.Tensor:
    """Returns [size] float32, uniform and symmetric in the open interval (-1/2, 1/2).

    These are the values from position `start` of the sequence of the seed, [2] int32.
    """
    words = tf.bitcast(seed, tf.uint32)
    random_bits = _mix(tf.bitcast(tf.range(start, start + size), tf.uint32) + words[0], words[1])
    # 22 random bits and a final 1 are the fraction of a number in [1, 2). The result is never a bound of the interval, so 0
    # is never rounded to a nonzero level.
    fraction = tf.bitwise.bitwise_or(tf.bitwise.right_shift(random_bits, _u32(9)), _u32(0x3F800001))
    return tf.bitcast(fraction, tf.float32) - 1.5


def fold_in(seed: tf.Tensor, number: Any) -> tf.Tensor:
    """Returns a seed [2] int32 derived from a seed and a number, an int32 tensor or an int."""
    return tf.bitcast(_mix(tf.bitcast(seed, tf.uint32) + tf.cast(number, tf.uint32), _u32(0)), tf.int32)


def _mix(x: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    x = _xorshift(x, 16) * _u32(0x7FEB352D)
    x = _xorshift(tf.bitwise.bitwise_xor(x, key), 15) * _u32(0x846CA68B)
    return _xorshift(x, 16)


def _xorshift(x: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(x, tf.bitwise.right_shift(x, _u32(bits)))


def _u32(value: int) -> tf.Tensor:
    return tf.constant(value, tf.uint32)


_BITS = 32


def sign_bits(rows: int, columns: int, seed: tf.Tensor) -> tf.Tensor:
    """Returns random bits for the signs of a matrix [rows, columns], as [ceil(rows / 32), columns] int32."""
    return tf.random.stateless_uniform([-(-rows // _BITS), columns], seed, None, None, tf.int32)


def flip_signs(x: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Returns x [rows, columns] float32 with the signs of random elements flipped; for use under XLA."""
    rows = x.shape[0]
    shifts = tf.constant(_BITS - 1 - np.arange(rows) % _BITS, tf.int32)[:, None]
    words = tf.repeat(bits, _BITS, axis=0)[:rows]
    signs = tf.bitwise.bitwise_and(tf.bitwise.left_shift(words, shifts), tf.int32.min)
    return tf.bitcast(tf.bitwise.bitwise_xor(tf.bitcast(x, tf.int32), signs), tf.float32)


def orthonormalize(rows: tf.Tensor) -> tf.Tensor:
    """Returns orthonormal rows with the span of `rows`, [r, m] float32 or float64, r static and small.

    A row that depends linearly on previous rows becomes zero. Each row is projected twice, which makes it orthogonal up
    to rounding (Giraud et al., 2005: "twice is enough"), and counts as dependent if at most 100 epsilon of it remains.
    Rows are scaled first, so squares neither overflow nor underflow. Never fails, and never returns a NaN for finite rows.
    """
    tolerance = 100 * np.finfo(rows.dtype.as_numpy_dtype).eps
    unit_rows = normalize_rows(rows)
    norms = tf.norm(unit_rows, axis=1, keepdims=True)
    basis_rows: list[tf.Tensor] = []
    for k in range(rows.shape[0]):
        row = unit_rows[k : k + 1]
        if basis_rows:
            basis = tf.concat(basis_rows, axis=0)
            for _ in range(2):
                row -= tf.matmul(tf.matmul(row, basis, transpose_b=True), basis)
        norm = tf.norm(row)
        basis_rows.append(tf.where(norm > tolerance * norms[k], row / norm, tf.zeros_like(row)))
    return tf.concat(basis_rows, axis=0)


def normalize_rows(rows: tf.Tensor) -> tf.Tensor:
    """Scales rows [r, m] so that their largest magnitudes are 1; zero rows stay zero."""
    return tf.math.divide_no_nan(rows, tf.reduce_max(tf.abs(rows), axis=1, keepdims=True))


def round_to_uint8(y: tf.Tensor, low: int, high: int, noise: tf.Tensor | None = None) -> tf.Tensor:
    """Rounds numbers to integers and subtracts `low`.

    Args:
      y: float32, in [low, high] up to rounding.
      low: at least -255.
      high: at most low + 255.
      noise: None to round to the nearest, ties to even; or numbers of y's shape, uniform in (-1/2, 1/2), which round
        each y up or down with y as the expected value.

    Returns:
      uint8, round(y) - low.
    """
    if noise is not None:
        y = tf.clip_by_value(y + noise, float(low), float(high))
    # In [2^23, 2^24) floats are integers, so this addition rounds, and leaves the integer in the low bits of the float.
    # A cast to an integer would check every element for overflow.
    integers = tf.bitcast(y + 1.5 * 2.0**23, tf.int32) - low
    return tf.cast(tf.bitwise.bitwise_and(integers, 255), tf.uint8)


def divide_or_zero(x: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
    """Returns x / scales, or 0 where a scale is 0 or a denormal, which the processor may flush to 0."""
    return x / tf.where(scales >= 2.0**-126, scales, float("inf"))
