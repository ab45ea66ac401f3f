"""Partition of the rows of the global batches of a stream among replicas, in order."""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist import keras_internals
from tfdist.data.row_allocation import EVEN, RowAllocation, computed
from tfdist.errors import InputError

MICRO_STEPS = "micro-steps"


def check_equal_shares(batch_size: int, replicas: int, micro_steps: int = 1, name: str = MICRO_STEPS) -> None:
    """Checks that every replica gets the same number of rows in each micro-step, for strategies with static shapes.

    Args:
      batch_size: global batch size.
      replicas: number of replicas.
      micro_steps: micro-steps per step.
      name: what they are called.

    Raises:
      InputError: the batch size does not allow it.
    """
    shares = replicas * micro_steps
    if batch_size % shares:
        below = batch_size - batch_size % shares
        near = " or ".join(str(size) for size in (below, below + shares) if size)
        raise InputError(
            f"--batch_size must be divisible by the number of {what_shares(micro_steps, name)} for this strategy. "
            f"Received: --batch_size={batch_size} and {describe_replicas(replicas, micro_steps, name)}. Use {near}."
        )


def what_shares(micro_steps: int, name: str = MICRO_STEPS) -> str:
    """Names what shares a batch, for messages."""
    return f"replicas times that of {name}" if micro_steps > 1 else "replicas"


def describe_replicas(replicas: int, micro_steps: int, name: str = MICRO_STEPS) -> str:
    """Describes how many share a batch, for messages."""
    return f"{replicas} replica{'s' * (replicas != 1)}" + (f" of {micro_steps} {name} each" if micro_steps > 1 else "")


@dataclasses.dataclass(frozen=True)
class RowPartition:
    """The positions in the stream that each element of one process's data set covers.

    Element i belongs to batch `i // len(replicas)`, counted from 0 here, and to replica `replicas[i % len(replicas)]`.

    Attributes:
      batch_size: rows of a global batch.
      replicas: indices of this process's replicas, in order.
      size: number of all replicas.
      first: position at which the first batch begins.
      total: end of the stream (exclusive), so that the last batch may be short; None for an endless stream.
      allocation: how many rows of a batch each replica gets; only an even one may be of a stream with an end.
    """

    batch_size: int
    replicas: tuple[int, ...]
    size: int
    first: int = 0
    total: int | None = None
    allocation: RowAllocation = EVEN

    @property
    def elements(self) -> int:
        """Number of elements; tf.data's constant for infinity if the stream is endless."""
        if self.total is None:
            return tf.data.INFINITE_CARDINALITY
        return -((self.first - self.total) // self.batch_size) * len(self.replicas)

    @property
    def static_count(self) -> int | None:
        """Number of rows in every element, at least 1, or None if it varies."""
        allocated = self.allocation.counts(self.batch_size, self.size)
        counts = {max(allocated[replica], 1) for replica in self.replicas} if allocated else set()
        short = self.total is not None and (self.total - self.first) % self.batch_size
        return None if short or len(counts) != 1 else counts.pop()

    def share(self, batch: tf.Tensor, local: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns begin and end of the rows that a local replica computes, and how many of them count, int64 scalars."""
        present, replica = self._present(batch), tf.constant(self.replicas, tf.int64)[local]
        first, count = self.allocation.share(batch, present, replica, self.size)
        return *computed(first, count, present), count

    def counts(self, element: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns how many rows of an element count, and how many its batch has, int32 scalars."""
        batch = element // len(self.replicas)
        *_, count = self.share(batch, element % len(self.replicas))
        return tf.cast(count, tf.int32), tf.cast(self._present(batch), tf.int32)

    def positions(self, element: tf.Tensor) -> tf.Tensor:
        """Returns the positions of the rows in an element, int64 [rows]."""
        batch = element // len(self.replicas)
        begin, end, _ = self.share(batch, element % len(self.replicas))
        start = self._start(batch)
        return tf.ensure_shape(tf.range(start + begin, start + end), [self.static_count])

    def map(self, function: Callable[[tf.Tensor], Any]) -> tf.data.Dataset:
        """Returns the data set of the results of a function of tfdist for each element's positions."""
        numbers = tf.data.Dataset.counter() if self.total is None else tf.data.Dataset.range(self.elements)
        mapped = keras_internals.without_autograph(lambda element: function(self.positions(element)))
        return numbers.map(mapped, num_parallel_calls=tf.data.AUTOTUNE)

    def _present(self, batch: tf.Tensor) -> tf.Tensor:
        full = tf.constant(self.batch_size, tf.int64)
        return full if self.total is None else tf.minimum(full, self.total - self._start(batch))

    def _start(self, batch: tf.Tensor) -> tf.Tensor:
        """Returns the position at which a batch begins, int64."""
        return self.first + batch * self.batch_size
