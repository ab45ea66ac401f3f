"""Input pipelines: distribute the rows of each step to replicas."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist import keras_internals
from tfdist.data.examples import Element, Examples
from tfdist.data.indexed_batch import IndexedBatch
from tfdist.data.replica_rows import ReplicaRows
from tfdist.data.row_allocation import EVEN, RowAllocation
from tfdist.data.row_partition import MICRO_STEPS, RowPartition, check_equal_shares, describe_replicas, what_shares
from tfdist.errors import InputError

_STEPS_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """Endless training batches: full global batches that are a pure function of (seed, first).

    Attributes:
      source: the examples.
      batch_size: global batch size, over all replicas, at least 1; may exceed the size of the source.
      seed: seed of the order of examples.
      first: position of the first example in the stream; batches are the same as if those before it were skipped.
      allocation: how many rows of a batch each replica gets.
    """

    source: Examples
    batch_size: int
    seed: int
    first: int = 0
    allocation: RowAllocation = EVEN

    def __post_init__(self) -> None:
        """Validates the values."""
        _check_batch_size(self.batch_size)
        if self.first < 0:
            raise InputError(f"The index of the first example must be at least 0. Received: {self.first}.")

    def dataset(self, replicas: Sequence[int], size: int) -> tf.data.Dataset:
        """Returns the rows of this process's replicas, in turn: the `batch` of each element of `numbered`."""
        return self._dataset(replicas, size, numbered=False)

    def numbered(self, replicas: Sequence[int], size: int) -> tf.data.Dataset:
        """Returns the rows of this process's replicas, in turn, with the indices of the examples.

        Args:
          replicas: indices of this process's replicas.
          size: number of all replicas, at most `batch_size`.

        Returns:
          An endless data set of `IndexedBatch`. Element i belongs to batch `i // len(replicas)`, counted from here, and
          to `replicas[i % len(replicas)]`. Its first dim is static if all these replicas have the same number of rows.

        Raises:
          InputError: there are more replicas than rows.
        """
        return self._dataset(replicas, size, numbered=True)

    def _dataset(self, replicas: Sequence[int], size: int, numbered: bool) -> tf.data.Dataset:
        check_batch_size(self.batch_size, size)
        partition = RowPartition(self.batch_size, tuple(replicas), size, self.first, allocation=self.allocation)
        batches = self.source.indexed_batches(partition, self.seed)
        return prepared(batches if numbered else batches.map(_batch), len(partition.replicas))


@dataclasses.dataclass(frozen=True)
class EvaluationPipeline:
    """Evaluation batches: one pass in the natural order.

    The last batch is short if the batch size does not divide the number of examples. It is distributed as evenly as any
    other: a replica may have no row of it that counts.

    Attributes:
      source: the examples.
      batch_size: examples per batch, over all replicas, at least 1.
    """

    source: Examples
    batch_size: int

    def __post_init__(self) -> None:
        """Validates the values."""
        _check_batch_size(self.batch_size)

    @property
    def steps(self) -> int:
        """Number of batches per pass."""
        return -(-self.source.size // self.batch_size)

    def dataset(self, replicas: Sequence[int], size: int) -> tf.data.Dataset:
        """Returns the `ReplicaRows` of this process's replicas in turn, `steps * len(replicas)` elements; see `Pipeline`."""
        return one_pass(self.source, RowPartition(self.batch_size, tuple(replicas), size, total=self.source.size))


def one_pass(examples: Examples, partition: RowPartition) -> tf.data.Dataset:
    """Returns the `ReplicaRows` of a process's replicas in turn, in one pass in the natural order."""

    @keras_internals.without_autograph
    def replica_rows(element: tf.Tensor, found: IndexedBatch) -> ReplicaRows:
        count, batch_size = partition.counts(element)
        return ReplicaRows(found.batch, (count,), batch_size)

    batches = examples.indexed_batches(partition, seed=None).enumerate()
    return prepared(batches.map(replica_rows), len(partition.replicas))


@keras_internals.without_autograph
def _batch(element: IndexedBatch) -> Element:
    return element.batch


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise InputError(f"--batch_size must be at least 1. Received: {batch_size}.")


def check_batch_size(
    batch_size: int, replicas: int, micro_steps: int = 1, equal: bool = False, name: str = MICRO_STEPS
) -> None:
    """Checks that every replica has a row in each micro-step and, where shapes must be static, the same number.

    On a mesh a replica is a device along the batch's axis.

    Args:
      batch_size: global batch size.
      replicas: number of replicas.
      micro_steps: micro-steps per step.
      equal: whether all replicas must have the same number of rows.
      name: what micro-steps are called.

    Raises:
      InputError: the batch size does not allow it.
    """
    if equal:
        check_equal_shares(batch_size, replicas, micro_steps, name)
    if replicas * micro_steps > batch_size:
        raise InputError(
            f"--batch_size must be at least the number of {what_shares(micro_steps, name)}. Received: "
            f"--batch_size={batch_size} and {describe_replicas(replicas, micro_steps, name)}. Every replica needs a row of "
            "every step."
        )


def prepared(dataset: tf.data.Dataset, replicas: int) -> tf.data.Dataset:
    """Prefetches for a process's replicas, in threads other than those of the training step."""
    options: Any = tf.data.Options()
    options.deterministic = True
    options.threading.private_threadpool_size = 0  # one per core, for sources that decode
    options.threading.max_intra_op_parallelism = 1
    # The destructor of an iterator waits for the autotuning thread to wake up, which may take a minute. Without
    # autotuning, AUTOTUNE means the number of cores, at most 16.
    options.autotune.enabled = False
    return dataset.prefetch(_STEPS_AHEAD * replicas).with_options(options)
