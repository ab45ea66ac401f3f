"""Random signs, one random bit per element."""

import numpy as np
import tensorflow as tf

_BITS = 32


def sign_bits(rows: int, columns: int, seed: tf.Tensor) -> tf.Tensor:
    """Returns random bits for the signs of a matrix [rows, columns], as [ceil(rows / 32), columns] int32."""
    return tf.random.stateless_uniform([-(-rows // _BITS), columns], seed, None, None, tf.int32)


def flipped(x: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Returns x [rows, columns] float32 with the signs of random elements flipped; for use under XLA."""
    rows = x.shape[0]
    shifts = tf.constant(_BITS - 1 - np.arange(rows) % _BITS, tf.int32)[:, None]
    words = tf.repeat(bits, _BITS, axis=0)[:rows]
    signs = tf.bitwise.bitwise_and(tf.bitwise.left_shift(words, shifts), tf.int32.min)
    return tf.bitcast(tf.bitwise.bitwise_xor(tf.bitcast(x, tf.int32), signs), tf.float32)
