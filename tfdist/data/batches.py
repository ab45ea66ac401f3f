"""Input pipelines, which distribute the rows of each batch to replicas.

Every process reads all data and keeps its own rows: the examples of a step do not depend on the number of replicas.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.data.examples import Examples
from tfdist.data.row_partition import (
    ABSENT,
    EVEN,
    IndexedBatch,
    ReplicaRows,
    RowAllocation,
    RowPartition,
    check_batch_size,
    mark_none,
    replica_range,
    restore_none,
    strip_none,
    traced_row_range,
)
from tfdist.errors import InputError

_STEPS_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """An endless stream of full global batches for training, which is a pure function of (seed, first).

    Attributes:
      source: training examples.
      batch_size: global batch size, over all replicas, at least 1; may exceed the size of the source.
      seed: seed of the order of examples.
      first: position of the first example in the stream; earlier examples are skipped.
      allocation: number of rows of a batch that each replica gets.
    """

    source: Examples
    batch_size: int
    seed: int
    first: int = 0
    allocation: RowAllocation = EVEN

    def dataset(self, replicas: Sequence[int], size: int) -> tf.data.Dataset:
        """Returns the same as `indexed_dataset`, without the indices of the examples."""
        return self.indexed_dataset(replicas, size).map(keras_internals.without_autograph(lambda rows: rows.batch))

    def indexed_dataset(self, replicas: Sequence[int], size: int) -> tf.data.Dataset:
        """Returns the rows of this process's replicas, one after another, with the indices of the examples.

        Args:
          replicas: indices of this process's replicas.
          size: total number of replicas.

        Returns:
          An endless dataset of `IndexedBatch`. Element i belongs to batch `i // len(replicas)`, counted from `first`, and
          to `replicas[i % len(replicas)]`. Its first dim is static if all these replicas have the same number of rows.

        Raises:
          InputError: there are more replicas than rows.
        """
        check_batch_size(self.batch_size, size)
        partition = RowPartition(self.batch_size, tuple(replicas), size, self.first, allocation=self.allocation)
        return prefetch_batches(self.source.indexed_batches(partition, self.seed), len(replicas))


@dataclasses.dataclass(frozen=True)
class EvaluationPipeline:
    """Evaluation batches: one pass over the examples in their natural order.

    The last batch is short if the number of examples is not divisible by the batch size. It is distributed as evenly as
    any other batch, so a replica may have no counted rows.

    Attributes:
      source: evaluation examples.
      batch_size: global batch size, over all replicas, at least 1.
    """

    source: Examples
    batch_size: int

    @property
    def steps(self) -> int:
        """Number of batches per pass."""
        return -(-self.source.size // self.batch_size)

    def dataset(self, replicas: Sequence[int], size: int) -> tf.data.Dataset:
        """Returns `steps * len(replicas)` elements of type `ReplicaRows`, in the order of `Pipeline.indexed_dataset`."""
        return single_pass(self.source, RowPartition(self.batch_size, tuple(replicas), size, total=self.source.size))


def single_pass(examples: Examples, partition: RowPartition) -> tf.data.Dataset:
    """Returns the `ReplicaRows` of a process's replicas, one after another, for one pass in the natural order."""

    @keras_internals.without_autograph
    def replica_rows(element: tf.Tensor, indexed: IndexedBatch) -> ReplicaRows:
        count, batch_size = partition.counts(element)
        return ReplicaRows(indexed.batch, (count,), batch_size)

    batches = examples.indexed_batches(partition, seed=None).enumerate()
    return prefetch_batches(batches.map(replica_rows), len(partition.replicas))


def prefetch_batches(dataset: tf.data.Dataset, replicas: int) -> tf.data.Dataset:
    """Prefetches batches for a process's replicas in a private thread pool."""
    options: Any = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = 0  # one thread per core, for sources that decode
    options.threading.max_intra_op_parallelism = 1
    # The destructor of an iterator waits for the autotuning thread to wake up, which may take a minute. Without
    # autotuning, AUTOTUNE means the number of cores, at most 16.
    options.autotune.enabled = False
    return dataset.prefetch(_STEPS_AHEAD * replicas).with_options(options)


def replica_part(batch: Any, replica: int | tf.Tensor, size: int) -> ReplicaRows:
    """Returns one replica's consecutive rows of a batch that is divided as evenly as possible among `size` replicas.

    The batch is a structure of tensors, which may have different numbers of rows.
    """
    batch, index = restore_none(batch), tf.cast(replica, tf.int32)
    rows = tf.nest.map_structure(lambda leaf: _replica_slice(leaf, index, size), batch)
    counts = [traced_row_range(count_rows(leaf), index, size)[1] for leaf in tf.nest.flatten(batch) if leaf is not None]
    return ReplicaRows(rows, tuple(counts), count_rows(batch))


def count_rows(batch: Any) -> tf.Tensor:
    """Returns the number of rows of a batch, a scalar int32."""
    first = next(leaf for leaf in tf.nest.flatten(batch) if leaf is not None)
    return tf.cast(first.nrows(), tf.int32) if isinstance(first, tf.RaggedTensor) else tf.shape(first)[0]


def has_static_rows(spec: Any) -> bool:
    """Returns whether the number of rows of a batch is static; `spec` is the batch's structure of type specs."""
    return any(isinstance(leaf, tf.TensorSpec) and leaf.shape[:1].is_fully_defined() for leaf in tf.nest.flatten(spec))


def static_rows(spec: Any) -> int | None:
    """Returns the static number of rows of a batch with type specs `spec`; None if unknown or not the same in all tensors."""
    leaves = [leaf for leaf in tf.nest.flatten(spec) if leaf is not None]
    sizes = {leaf.shape[0] if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank else None for leaf in leaves}
    return sizes.pop() if len(sizes) == 1 else None


def _replica_slice(leaf: Any, replica: tf.Tensor, size: int) -> Any:
    if isinstance(leaf, tf.SparseTensor):
        raise InputError(
            "A batch that is divided among replicas must be dense or ragged. Received: a SparseTensor. Apply "
            "tf.sparse.to_dense to it."
        )
    if leaf is None:
        return None
    row_count = count_rows(leaf)
    begin, end = replica_range(*traced_row_range(row_count, replica, size), row_count)
    rows = leaf[begin:end]
    if isinstance(leaf, tf.RaggedTensor):
        return rows
    static_size = leaf.shape[0]
    static_count = static_size // size if static_size is not None and static_size % size == 0 else None
    return tf.ensure_shape(rows, [static_count, *leaf.shape[1:]])


def split_batches(
    batches: tf.data.Dataset, replicas: Sequence[int], size: int, on_read: Callable[[int, int], None] | None = None
) -> tf.data.Dataset:
    """Splits batches, which are the same on every process, into the `ReplicaRows` of this process's replicas.

    `on_read` is called with the index and the `checksum` of each batch that is read.
    """
    replica_indices = tf.constant(list(replicas), tf.int32)

    @keras_internals.without_autograph
    def replica_batches(batch_index: tf.Tensor, batch: Any) -> tf.data.Dataset:
        batch = mark_none(strip_none(restore_none(batch)))
        batch = batch if on_read is None else _with_callback(batch_index, batch, on_read)
        return tf.data.Dataset.range(len(replicas)).map(
            lambda index: mark_none(replica_part(batch, tf.gather(replica_indices, index), size))
        )

    return prefetch_batches(batches.enumerate().flat_map(replica_batches), len(replicas))


def _with_callback(batch_index: tf.Tensor, batch: Any, on_read: Callable[[int, int], None]) -> Any:
    def call(index: np.ndarray, checksum: np.ndarray) -> np.int64:
        on_read(int(index), int(checksum))
        return np.int64(0)

    with tf.control_dependencies([tf.numpy_function(call, [batch_index, _fingerprint(batch)], tf.int64)]):
        return tf.nest.map_structure(tf.identity, batch, expand_composites=True)


def checksum(batch: Any) -> int:
    """Returns a checksum of the bytes of a structure of arrays or tensors, in [-2**63, 2**63)."""
    return int(_fingerprint(batch))


def _fingerprint(batch: Any) -> tf.Tensor:
    """Returns the same value as `checksum`, as a scalar int64.

    `tf.fingerprint` is six times as fast as `zlib.crc32`, and releases the GIL.
    """
    leaves = [tf.convert_to_tensor(leaf) for leaf in tf.nest.flatten(batch, expand_composites=True)]
    fingerprints = [_tensor_fingerprint(leaf) for leaf in leaves if leaf.dtype not in (tf.variant, ABSENT)]
    return tf.bitcast(_tensor_fingerprint(tf.concat(fingerprints, axis=0)), tf.int64)


def _tensor_fingerprint(leaf: tf.Tensor) -> tf.Tensor:
    """Returns a fingerprint of a tensor's elements, uint8 [8]; zeros for an empty tensor."""
    fingerprint = tf.fingerprint(tf.reshape(leaf, [1, -1]))[0]
    # TensorFlow leaves the fingerprint of an empty tensor uninitialized.
    return tf.where(tf.size(leaf) > 0, fingerprint, tf.zeros_like(fingerprint))
