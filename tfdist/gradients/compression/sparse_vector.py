"""Selects the elements of the largest magnitudes, sums sparse vectors, and reduces the rows of matrices."""

from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.gradients.compression.arguments import run_with_xla

# Chosen by measurement: a halving step fits into registers, and the remaining loop is short.
_FOLDED_WIDTH = 128
_MIN_WIDTH = 16


def peaks(rows: tf.Tensor) -> tf.Tensor:
    """Returns the largest magnitude [m] of each row of `rows`, [m, k] float32, k at least 1.

    It is finite if and only if the row is: NaN if the row contains NaN, else inf if it contains inf.
    """
    return tf.bitcast(_reduce_rows(magnitudes(rows), tf.maximum, tf.reduce_max), tf.float32)


def sums(rows: tf.Tensor) -> tf.Tensor:
    """Returns the sum of each row of `rows`, [m, k], k at least 1."""
    return _reduce_rows(rows, tf.add, tf.reduce_sum)


def _reduce_rows(rows: tf.Tensor, combine: Callable[..., tf.Tensor], reduce: Callable[..., tf.Tensor]) -> tf.Tensor:
    """Reduces rows. The last operation is a reduction, because XLA does not recompute reductions for each user."""
    count, width = rows.shape
    full_width = width // _FOLDED_WIDTH * _FOLDED_WIDTH
    results = [reduce(rows[:, full_width:], axis=1)] if full_width < width else []
    if full_width:
        pieces = tf.reshape(rows[:, :full_width], [count, full_width // _FOLDED_WIDTH, _FOLDED_WIDTH])
        while pieces.shape[2] > _MIN_WIDTH:
            half = pieces.shape[2] // 2
            pieces = combine(pieces[..., :half], pieces[..., half:])
        results.append(reduce(pieces, axis=[1, 2]))
    return results[0] if len(results) == 1 else combine(*results)


_ROW_SIZE = 8
_SHORT_LENGTH = 32768  # below this length, the plain search is fast enough


class SparseVector(NamedTuple):
    """Some elements of a vector."""

    indices: tf.Tensor  # [m] int32, distinct
    values: tf.Tensor  # [m] float32


def magnitudes(x: tf.Tensor) -> tf.Tensor:
    """Returns the bits of |x| as int32, which are ordered like |x|, with NaN above inf, and keep denormals."""
    return tf.bitwise.bitwise_and(tf.bitcast(x, tf.int32), 0x7FFFFFFF)


def top_k(x: tf.Tensor, k: int | tf.Tensor) -> SparseVector:
    """Returns the k largest |x| of x [n] float32, in any order; takes about 50 ns per element for large n."""
    indices = tf.math.top_k(magnitudes(x), k, sorted=False).indices
    return SparseVector(indices, tf.gather(x, indices))


def select_by_threshold(x: tf.Tensor, threshold: int | tf.Tensor) -> SparseVector:
    """Returns the elements of x [n] float32 whose `magnitudes` are at least `threshold`, above 0, in the order of x."""
    if x.shape[0] <= _SHORT_LENGTH:
        positions = tf.where(magnitudes(x) >= threshold)[:, 0]
        return SparseVector(tf.cast(positions, tf.int32), tf.gather(x, positions))
    if x.shape[0] % _ROW_SIZE:
        x = tf.pad(x, [[0, -x.shape[0] % _ROW_SIZE]])
    # Searches for rows with such an element first, because a search for elements is slower.
    row_indices = tf.where(run_with_xla(_rows_above, x, tf.convert_to_tensor(threshold)))[:, 0]
    candidates = tf.reshape(tf.gather(tf.reshape(x, [-1, _ROW_SIZE]), row_indices), [-1])
    positions = tf.where(magnitudes(candidates) >= threshold)[:, 0]
    return SparseVector(
        tf.cast(tf.gather(row_indices, positions // _ROW_SIZE) * _ROW_SIZE + positions % _ROW_SIZE, tf.int32),
        tf.gather(candidates, positions),
    )


def sample_size(ratio: float) -> int:
    """Returns the size, from 8192 to 65536, of a sample with about 256 of the largest elements, `ratio` of all."""
    return min(65536, max(8192, round(256 / ratio)))


def sampled_top_k(x: tf.Tensor, k: int | tf.Tensor, seed: tf.Tensor, sample: int) -> SparseVector:
    """Returns the k largest |x|, with high probability; takes 2 ns per element.

    A threshold is taken from a random sample, three standard deviations below its expected value, and the largest
    elements are selected among those that reach it. If fewer than k do, only these are returned. Zeros are omitted.

    Args:
      x: [n] float32, n static.
      k: number of elements, at most n.
      seed: [2] int32.
      sample: size of the sample; `top_k` searches vectors of up to four times this size.
    """
    size = x.shape[0]
    if size <= 4 * sample:
        return top_k(x, k)
    sample_bits = magnitudes(tf.gather(x, tf.random.stateless_uniform([sample], seed, 0, size, tf.int32)))
    hits = tf.cast(k, tf.float32) * (sample / size)
    threshold = tf.maximum(_nth_largest(sample_bits, tf.cast(hits + 3 * tf.sqrt(hits), tf.int32)), 1)
    candidates = select_by_threshold(x, threshold)
    bits = magnitudes(candidates.values)
    positions = tf.where(bits >= _nth_largest(bits, k - 1))[:k, 0]
    return SparseVector(*(tf.gather(part, positions) for part in candidates))


def pad_entries(vector: SparseVector, k: int) -> SparseVector:
    """Returns a vector with exactly k entries; an index of -1 marks an unused one."""
    padding = [[0, k - tf.size(vector.indices)]]
    parts = tf.pad(vector.indices, padding, constant_values=-1), tf.pad(vector.values, padding)
    return SparseVector(*(tf.ensure_shape(part, [k]) for part in parts))


def _nth_largest(x: tf.Tensor, n: int | tf.Tensor) -> tf.Tensor:
    """Returns the element of x [m] int32, nonnegative, that follows n others in descending order; 0 if m <= n."""
    return tf.raw_ops.NthElement(input=tf.concat([x, [0]], 0), n=tf.minimum(n, tf.size(x)), reverse=True)


def _rows_above(x: tf.Tensor, threshold: tf.Tensor) -> tf.Tensor:
    return tf.reduce_any(magnitudes(tf.reshape(x, [-1, _ROW_SIZE])) >= threshold, axis=1)


_MAX_UNCOMPILED = 4096  # entries; XLA saves 0.2 us per entry, and compiling takes 0.2 s


def to_dense(indices: tf.Tensor, values: tf.Tensor, size: int) -> tf.Tensor:
    """Sums sparse vectors one after the other, so the order of summation is the same on any device.

    Args:
      indices: [vectors, k] int32, static; distinct within a vector. A negative index marks an unused entry.
      values: [vectors, k] float32.
      size: length of the vectors.

    Returns:
      Their sum, [size] float32.
    """
    if indices.shape.num_elements() <= _MAX_UNCOMPILED:
        return _sum_dense(size, indices, values)
    return run_with_xla(_sum_dense, size, indices, values)


def _sum_dense(size: int, indices: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    total = tf.zeros([size])
    for vector in range(indices.shape[0]):
        total = _add_sparse(total, indices[vector], values[vector])
    return total


def _add_sparse(total: tf.Tensor, indices: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    is_unused = indices < 0
    positions, summands = tf.where(is_unused, 0, indices), tf.where(is_unused, 0.0, values)
    return tf.tensor_scatter_nd_add(total, positions[:, None], summands)


def sum_sparse(
    indices: tf.Tensor, values: tf.Tensor, check: tf.Tensor, size: int, collectives: Collectives, *, name: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums sparse vectors over the replicas; the number of entries may differ between replicas.

    All-gathers rows (index, bits of the value). Each replica's first row is (number of entries, bits of the check), so no
    other message is needed to split the gathered rows. Cost: m entries are 8 (m + 1) bytes.

    Args:
      indices: [m] int32, distinct; m need not be static. A negative index marks an unused entry.
      values: [m] float32.
      check: scalar float32, sent to all replicas.
      size: length of the vectors.
      collectives: collectives of the replica.
      name: name of the message.

    Returns:
      The sum over replicas, [size] float32, bitwise equal on all; and the check of each replica, [replicas] float32.
    """
    head = tf.stack([tf.size(indices), tf.bitcast(check, tf.int32)])
    entries = tf.stack([indices, tf.bitcast(values, tf.int32)], axis=1)
    [rows] = collectives.all_gather([tf.concat([head[None], entries], axis=0)], name=name)
    total, checks, start = tf.zeros([size]), [], 0
    for _ in range(collectives.size):
        first_entry, start = start + 1, start + 1 + rows[start, 0]
        rank_entries = rows[first_entry:start]
        checks.append(tf.bitcast(rows[first_entry - 1, 1], tf.float32))
        total = _add_sparse(total, rank_entries[:, 0], tf.bitcast(rank_entries[:, 1], tf.float32))
    return total, tf.stack(checks)
