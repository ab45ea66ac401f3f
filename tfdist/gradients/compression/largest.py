"""The largest magnitudes of a vector: by a heap over all of it, by a threshold, or by a threshold from a sample."""

from typing import NamedTuple

import tensorflow as tf

from tfdist.gradients.compression.compiled import compiled

_ROW = 8
_SHORT = 32768  # a vector in which nobody notices how long the plain search takes


class Found(NamedTuple):
    """Elements of a vector.

    Attributes:
      indices: [m] int32, distinct.
      values: [m] float32.
    """

    indices: tf.Tensor
    values: tf.Tensor


def magnitudes(x: tf.Tensor) -> tf.Tensor:
    """The bits of |x| as int32, which order as |x| does, above it the NaNs; nothing is flushed to zero."""
    return tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), 0x7FFFFFFF)


def largest(x: tf.Tensor, k: int | tf.Tensor) -> Found:
    """Finds the k largest |x| of x [n] float32, in no order; some 50 ns an element if n is large."""
    indices = tf.math.top_k(magnitudes(x), k, sorted=False).indices
    return Found(indices, tf.gather(x, indices))


def reaching(x: tf.Tensor, threshold: int | tf.Tensor) -> Found:
    """Finds the elements of x [n] float32 whose `magnitudes` are at least a threshold above 0, in the order of x."""
    if x.shape[0] <= _SHORT:
        places = tf.where(magnitudes(x) >= threshold)[:, 0]
        return Found(tf.cast(places, tf.int32), tf.gather(x, places))
    if x.shape[0] % _ROW:
        x = tf.pad(x, [[0, -x.shape[0] % _ROW]])
    # The search for rows that have such an element shortens the slower one for the elements.
    rows = tf.where(compiled(_rows_that_reach, x.shape[0])(x, tf.convert_to_tensor(threshold)))[:, 0]
    near = tf.reshape(tf.gather(tf.reshape(x, [-1, _ROW]), rows), [-1])
    places = tf.where(magnitudes(near) >= threshold)[:, 0]
    return Found(tf.cast(tf.gather(rows, places // _ROW) * _ROW + places % _ROW, tf.int32), tf.gather(near, places))


def sample_size(ratio: float) -> int:
    """How long a sample has about 256 of the largest elements, `ratio` of all; never longer than is cheap to draw."""
    return min(65536, max(8192, round(256 / ratio)))


def largest_sampled(x: tf.Tensor, k: int | tf.Tensor, seed: tf.Tensor, sample: int) -> Found:
    """Finds the k largest |x| almost always, in 2 ns an element.

    A threshold is taken from a random sample, three standard deviations lower than would do on average, and the largest
    are found among what reaches it. Where fewer than k do, those are all that is returned. Zeros are left out.

    Args:
      x: [n] float32, n static.
      k: at most n.
      seed: [2] int32.
      sample: how many elements to look at first; a vector not much longer is searched whole, by `largest`.
    """
    size = x.shape[0]
    if size <= 4 * sample:
        return largest(x, k)
    drawn = magnitudes(tf.gather(x, tf.random.stateless_uniform([sample], seed, 0, size, tf.int32)))
    hits = tf.cast(k, tf.float32) * (sample / size)
    threshold = tf.maximum(_nth(drawn, tf.cast(hits + 3 * tf.sqrt(hits), tf.int32)), 1)
    candidates = reaching(x, threshold)
    bits = magnitudes(candidates.values)
    chosen = tf.where(bits >= _nth(bits, k - 1))[:k, 0]
    return Found(*(tf.gather(part, chosen) for part in candidates))


def filled(found: Found, k: int) -> Found:
    """Exactly k elements: slots that were not found get an index of -1, which says that they are not used."""
    spare = [[0, k - tf.size(found.indices)]]
    padded = tf.pad(found.indices, spare, constant_values=-1), tf.pad(found.values, spare)
    return Found(*(tf.ensure_shape(part, [k]) for part in padded))


def _nth(x: tf.Tensor, n: int | tf.Tensor) -> tf.Tensor:
    """The element of x [m] int32, all above 0 or 0, that n others stand before when the largest come first; 0 if m <= n."""
    return tf.raw_ops.NthElement(input=tf.concat([x, [0]], 0), n=tf.minimum(n, tf.size(x)), reverse=True)


def _rows_that_reach(size: int, x: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    return tf.reduce_any(magnitudes(tf.reshape(x, [size // _ROW, _ROW])) >= threshold, axis=1)
