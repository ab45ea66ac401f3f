"""Top-k kernels: the largest magnitudes of a vector, by a heap, by a threshold, or by a threshold from a sample."""

from typing import NamedTuple

import tensorflow as tf

from tfdist.gradients.compression.compiled import compiled

_ROW = 8
_SHORT = 32768  # below this length, the plain search is fast enough


class Found(NamedTuple):
    """Elements of a vector.

    Attributes:
      indices: [m] int32, distinct.
      values: [m] float32.
    """

    indices: tf.Tensor
    values: tf.Tensor


def magnitudes(x: tf.Tensor) -> tf.Tensor:
    """Returns the bits of |x| as int32, which have the order of |x|, NaNs above; denormals are not flushed to zero."""
    return tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), 0x7FFFFFFF)


def largest(x: tf.Tensor, k: int | tf.Tensor) -> Found:
    """Finds the k largest |x| of x [n] float32, in any order; some 50 ns per element for large n."""
    indices = tf.math.top_k(magnitudes(x), k, sorted=False).indices
    return Found(indices, tf.gather(x, indices))


def reaching(x: tf.Tensor, threshold: int | tf.Tensor) -> Found:
    """Finds the elements of x [n] float32 whose `magnitudes` are at least `threshold`, above 0, in the order of x."""
    if x.shape[0] <= _SHORT:
        places = tf.where(magnitudes(x) >= threshold)[:, 0]
        return Found(tf.cast(places, tf.int32), tf.gather(x, places))
    if x.shape[0] % _ROW:
        x = tf.pad(x, [[0, -x.shape[0] % _ROW]])
    # A search for rows with such an element comes first: the search for elements is slower.
    rows = tf.where(compiled(_rows_that_reach, x.shape[0])(x, tf.convert_to_tensor(threshold)))[:, 0]
    near = tf.reshape(tf.gather(tf.reshape(x, [-1, _ROW]), rows), [-1])
    places = tf.where(magnitudes(near) >= threshold)[:, 0]
    return Found(tf.cast(tf.gather(rows, places // _ROW) * _ROW + places % _ROW, tf.int32), tf.gather(near, places))


def sample_size(ratio: float) -> int:
    """Returns the size of a sample that contains about 256 of the largest elements, `ratio` of all; 8192 to 65536."""
    return min(65536, max(8192, round(256 / ratio)))


def largest_sampled(x: tf.Tensor, k: int | tf.Tensor, seed: tf.Tensor, sample: int) -> Found:
    """Finds the k largest |x|, with high probability, in 2 ns per element.

    A threshold is taken from a random sample, three standard deviations below its expected value, and the largest
    elements are selected among those that reach it. If fewer than k do, only those are returned. Zeros are left out.

    Args:
      x: [n] float32, n static.
      k: at most n.
      seed: [2] int32.
      sample: size of the sample; vectors of up to four times that size are searched completely, by `largest`.
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
    """Pads to exactly k elements; an index of -1 marks an unused entry."""
    spare = [[0, k - tf.size(found.indices)]]
    padded = tf.pad(found.indices, spare, constant_values=-1), tf.pad(found.values, spare)
    return Found(*(tf.ensure_shape(part, [k]) for part in padded))


def _nth(x: tf.Tensor, n: int | tf.Tensor) -> tf.Tensor:
    """Returns the element of x [m] int32, nonnegative, that follows n others in descending order; 0 if m <= n."""
    return tf.raw_ops.NthElement(input=tf.concat([x, [0]], 0), n=tf.minimum(n, tf.size(x)), reverse=True)


def _rows_that_reach(size: int, x: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    return tf.reduce_any(magnitudes(tf.reshape(x, [size // _ROW, _ROW])) >= threshold, axis=1)
