"""Batched data sets: each element is a global batch, whose rows are distributed to replicas.

Every process reads all of it and keeps its own rows, so that the examples of a step do not depend on the number of
replicas.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.data.pipeline import prepared
from tfdist.data.replica_rows import ReplicaRows
from tfdist.data.row_allocation import computed, rows, share
from tfdist.data.structures import ABSENT, with_none, without_absent, without_none
from tfdist.errors import InputError


def part(batch: Any, replica: int | tf.Tensor, size: int) -> ReplicaRows:
    """Returns one replica's consecutive rows of a batch that is distributed as evenly as possible.

    Args:
      batch: structure of tensors; each is split by its own rows.
      replica: in [0, size).
      size: number of replicas that share the batch.
    """
    batch, number = with_none(batch), tf.cast(replica, tf.int32)
    computed_rows = tf.nest.map_structure(lambda leaf: _cut(leaf, number, size), batch)
    counts = [share(count_rows(leaf), number, size)[1] for leaf in tf.nest.flatten(batch) if leaf is not None]
    return ReplicaRows(computed_rows, tuple(counts), count_rows(batch))


def count_rows(batch: Any) -> tf.Tensor:
    """Returns the number of rows of a batch, a scalar int32."""
    first = next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None)
    return tf.cast(first.nrows(), tf.int32) if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0]


def has_static_rows(spec: Any) -> bool:
    """Returns whether TensorFlow knows the number of rows of a batch, given a structure of specs, when code is traced."""
    return any(isinstance(each, tf.TensorSpec) and each.shape[:1].is_fully_defined() for each in tf.nest.flatten(spec))


def static_rows(spec: Any) -> int | None:
    """Returns the number of rows of a batch if it is known, and the same for all tensors, given a structure of specs."""
    leaves = [each for each in tf.nest.flatten(spec) if each is not None]
    known = {each.shape[0] if isinstance(each, tf.TensorSpec) and each.shape.rank else None for each in leaves}
    return known.pop() if len(known) == 1 else None


def _cut(leaf: Any, replica: tf.Tensor, size: int) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        raise InputError(
            "Rows of a batch are split between replicas. Received: a SparseTensor. Use tf.sparse.to_dense on it."
        )
    if leaf is None:
        return None
    present = count_rows(leaf)
    begin, end = computed(*share(present, replica, size), present)
    mine = leaf[begin:end]
    if isinstance(leaf, tf.RaggedTensor):
        return mine
    static = leaf.shape[0]
    equal = rows(static, 0, size)[1] if static is not None and static % size == 0 else None
    return tf.ensure_shape(mine, [equal, *leaf.shape[1:]])


def split_batches(
    batches: tf.data.Dataset, replicas: Sequence[int], size: int, note: Callable[[int, int], None] | None = None
) -> tf.data.Dataset:
    """Returns a data set of the rows of this process's replicas in turn, each a `ReplicaRows`.

    Args:
      batches: global batches, the same on every process.
      replicas: indices of this process's replicas.
      size: number of all replicas.
      note: called with the number and the `checksum` of each batch when it is read.
    """
    mine = tf.constant(list(replicas), tf.int32)

    @keras_internals.without_autograph
    def shares(number: tf.Tensor, batch: Any) -> tf.data.Dataset:
        batch = without_none(without_absent(with_none(batch)))
        whole = batch if note is None else _noted(number, batch, note)
        return tf.data.Dataset.range(len(replicas)).map(
            lambda local: without_none(part(whole, tf.gather(mine, local), size))
        )

    return prepared(batches.enumerate().flat_map(shares), len(replicas))


def _noted(number: tf.Tensor, batch: Any, note: Callable[[int, int], None]) -> Any:
    """Returns the same batch; when it is read, its checksum is noted."""

    def told(number: np.ndarray, found: np.ndarray) -> np.int64:
        note(int(number), int(found))
        return np.int64(0)

    with tf.control_dependencies([tf.numpy_function(told, [number, _fingerprint(batch)], tf.int64)]):
        return tf.nest.map_structure(tf.identity, batch, expand_composites=True)


def checksum(batch: Any) -> int:
    """Returns a checksum of the bytes of a structure of arrays or tensors, in [-2**63, 2**63)."""
    return int(_fingerprint(batch))


def _fingerprint(batch: Any) -> tf.Tensor:
    """Same as `checksum`, as a scalar int64.

    It is computed by an operation of TensorFlow, six times as fast as `zlib.crc32`, and without the GIL.
    """
    leaves = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(batch, expand_composites=True)]
    of_leaves = [_of_bytes(leaf) for leaf in leaves if leaf.dtype not in (tf.variant, ABSENT)]
    return tf.bitcast(_of_bytes(tf.concat(of_leaves, axis=0)), tf.int64)


def _of_bytes(leaf: tf.Tensor) -> tf.Tensor:
    """Returns a fingerprint of a tensor's elements, [8] uint8; zeros if it has none."""
    found = tf.fingerprint(tf.reshape(leaf, [1, -1]))[0]
    return tf.where(
        tf.size(leaf) > 0, found, tf.zeros_like(found)
    )  # TensorFlow leaves it uninitialized without elements
