"""Sparse vectors as pairs of index and value: their dense sum, and their all-gather."""

from typing import NamedTuple

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.gradients.compression.compiled import compiled

_FEW = 4096  # XLA saves 0.2 us per entry, and compiling takes 0.2 s


def dense(indices: tf.Tensor, values: tf.Tensor, size: int) -> tf.Tensor:
    """Sums sparse vectors one after the other, so that the order of summation is the same on any device.

    Args:
      indices: [vectors, k] int32, static; distinct within a vector. A negative index marks an unused entry.
      values: [vectors, k] float32.
      size: length of the vectors.

    Returns:
      Their sum, [size] float32.
    """
    vectors, k = indices.shape
    if vectors * k <= _FEW:
        return _dense(size, vectors, k, indices, values)
    return compiled(_dense, size, vectors, k)(indices, values)


def _dense(size: int, vectors: int, _: int, indices: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    total = tf.zeros([size])
    for vector in range(vectors):
        total = _added(total, indices[vector], values[vector])
    return total


def _added(total: tf.Tensor, indices: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    unused = indices < 0
    places, summands = tf.where(unused, 0, indices), tf.where(unused, 0.0, values)
    return tf.tensor_scatter_nd_add(total, places[:, None], summands)


class Exchanged(NamedTuple):
    """The result of `exchange`.

    Attributes:
      total: [size] float32, the sum over replicas, bitwise equal on all.
      checks: [replicas] float32, the check of each replica.
    """

    total: tf.Tensor
    checks: tf.Tensor


def exchange(
    indices: tf.Tensor, values: tf.Tensor, check: tf.Tensor, size: int, collectives: Collectives, *, name: str
) -> Exchanged:
    """Sums sparse vectors over the replicas; the number of entries may differ between replicas.

    One all-gather of unequal sizes, of rows (index, bits of the value); each replica's first row is (number of entries,
    bits of the check), so no other message is needed to split the gathered rows. Cost: m entries are 8 (m + 1) bytes.

    Args:
      indices: [m] int32, distinct; m need not be static. A negative index marks an unused entry.
      values: [m] float32.
      check: scalar float32, sent to all replicas.
      size: length of the vectors.
      collectives: collectives of the replica.
      name: names the message.
    """
    head = tf.stack([tf.size(indices), tf.bitcast(check, tf.int32)])
    entries = tf.stack([indices, tf.bitcast(values, tf.int32)], axis=1)
    [rows] = collectives.all_gather([tf.concat([head[None], entries], axis=0)], name=name)
    total, checks, start = tf.zeros([size]), [], 0
    for _ in range(collectives.size):
        first, start = start + 1, start + 1 + rows[start, 0]
        mine = rows[first:start]
        checks.append(tf.bitcast(rows[first - 1, 1], tf.float32))
        total = _added(total, mine[:, 0], tf.bitcast(mine[:, 1], tf.float32))
    return Exchanged(total, tf.stack(checks))
