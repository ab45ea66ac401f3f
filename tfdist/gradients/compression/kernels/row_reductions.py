"""Row reductions by repeated halving, which XLA vectorizes; its own reduction of a row is sequential."""

from collections.abc import Callable

import tensorflow as tf

# Found by measurement: a halving step fits into registers, and the remaining loop is short.
_WIDE = 128
_NARROW = 16


def peaks(rows: tf.Tensor) -> tf.Tensor:
    """Returns the largest magnitude of each row, which is finite if and only if the row is.

    Args:
      rows: [m, k], of a floating dtype of 2 or 4 bytes, k at least 1.

    Returns:
      [m] of that dtype: NaN if a row has one, else inf if it has one.
    """
    # Interpreted as integers, magnitudes have the order of the floats, and NaN is above inf.
    integers = tf.int16 if rows.dtype.size == 2 else tf.int32
    bits = tf.bitwise.bitwise_and(tf.bitcast(rows, integers), tf.constant(integers.max, integers))
    return tf.bitcast(_folded(bits, tf.maximum, tf.reduce_max), rows.dtype)


def bounds(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the minimum and maximum of each row, which are both finite if and only if the row is.

    Args:
      rows: [m, k] float32, k at least 1.

    Returns:
      Two tensors [m] float32.
    """
    ordered = _ordered(tf.bitcast(rows, tf.int32))
    low, high = _folded(ordered, tf.minimum, tf.reduce_min), _folded(ordered, tf.maximum, tf.reduce_max)
    return tf.bitcast(_ordered(low), tf.float32), tf.bitcast(_ordered(high), tf.float32)


def sums(rows: tf.Tensor) -> tf.Tensor:
    """Returns the sum of each row of `rows`, [m, k], k at least 1."""
    return _folded(rows, tf.add, tf.reduce_sum)


def _ordered(bits: tf.Tensor) -> tf.Tensor:
    """Maps the bits of floats to integers of the same order, with NaN at both ends; its own inverse."""
    magnitude = tf.constant(tf.int32.max, tf.int32)
    return tf.where(bits < 0, tf.bitwise.bitwise_xor(bits, magnitude), bits)


def _folded(rows: tf.Tensor, join: Callable[..., tf.Tensor], reduce: Callable[..., tf.Tensor]) -> tf.Tensor:
    """Reduces rows. The last operation is a reduction, because XLA does not recompute reductions for each user."""
    count, width = rows.shape
    whole = width // _WIDE * _WIDE
    results = [reduce(rows[:, whole:], axis=1)] if whole < width else []
    if whole:
        pieces = tf.reshape(rows[:, :whole], [count, whole // _WIDE, _WIDE])
        while pieces.shape[2] > _NARROW:
            half = pieces.shape[2] // 2
            pieces = join(pieces[..., :half], pieces[..., half:])
        results.append(reduce(pieces, axis=[1, 2]))
    return results[0] if len(results) == 1 else join(*results)
