"""Allocations: how many rows of a global batch each replica computes; the rows of a replica are consecutive.

The loss divides by the rows of the whole batch, so that the allocation affects results by rounding only.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf


def rows(batch_size: int, replica: int, replicas: int) -> tuple[int, int]:
    """Returns one replica's consecutive rows of a batch that is allocated as evenly as possible.

    Args:
      batch_size: rows of the batch, at least 0.
      replica: in [0, replicas).
      replicas: number of replicas that share the batch.

    Returns:
      The first row and the number of rows, batch_size // replicas or one more.
    """
    quotient, extra = divmod(batch_size, replicas)
    return replica * quotient + min(replica, extra), quotient + (replica < extra)


def share(present: tf.Tensor, replica: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Same as `rows`, with tensors."""
    quotient, extra = present // size, present % size
    return replica * quotient + tf.minimum(replica, extra), quotient + tf.cast(replica < extra, present.dtype)


def computed(first: tf.Tensor, count: tf.Tensor, present: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns begin and end of the rows that a replica computes: its own or, without any, the last of the `present` rows."""
    begin = tf.minimum(first, present - 1)
    return begin, begin + tf.maximum(count, 1)


def apportion(batch_size: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Returns numbers of rows in proportion to weights, by largest remainders, and at least one for each replica.

    Args:
      batch_size: rows of the batch, at least one for each replica.
      weights: a positive number for each replica.
    """
    exact = [batch_size * weight / sum(weights) for weight in weights]
    counts = [max(int(number), 1) for number in exact]
    while sum(counts) < batch_size:
        lacking = [number - count for number, count in zip(exact, counts, strict=True)]
        counts[lacking.index(max(lacking))] += 1
    while sum(counts) > batch_size:
        excess = [count - number if count > 1 else -np.inf for number, count in zip(exact, counts, strict=True)]
        counts[excess.index(max(excess))] -= 1
    return tuple(counts)


class RowAllocation:
    """Allocates the rows of every batch, including one that is not full, as evenly as possible."""

    def counts(self, batch_size: int, size: int) -> tuple[int, ...] | None:
        """Returns the rows of each replica of a full batch; None if it may change.

        Args:
          batch_size: rows of a full batch.
          size: number of replicas.
        """
        return tuple(rows(batch_size, replica, size)[1] for replica in range(size))

    def share(self, batch: tf.Tensor, present: tf.Tensor, replica: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns one replica's first row and number of rows, scalars int64; traced into tf.data's graph.

        Args:
          batch: scalar int64; number of the batch, counted from the beginning of the pipeline.
          present: scalar int64; rows of this batch.
          replica: scalar int64, in [0, size).
          size: number of replicas.
        """
        return share(present, replica, size)


class FixedAllocation(RowAllocation):
    """An allocation of full batches that never changes."""

    def __init__(self, counts: Sequence[int]):
        """Initializes the allocation with the rows of each replica, at least 1."""
        self._counts = tuple(counts)

    def counts(self, batch_size: int, size: int) -> tuple[int, ...]:
        """See base class."""
        return self._counts

    def share(self, batch: tf.Tensor, present: tf.Tensor, replica: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
        """See base class."""
        return _share_of(tf.constant(self._counts, tf.int64), replica)


class ChangingAllocation(RowAllocation):
    """An allocation of full batches that may change from any step on that no pipeline has allocated yet.

    Pipelines read ahead, each process as far as it happens to be. A change therefore takes effect from the first step
    that none of them has allocated, which `held` returns, so that every batch is allocated once, in the same way everywhere.
    """

    def __init__(self, first_step: int, changes: Sequence[tuple[int, Sequence[int]]]):
        """Initializes the allocation.

        Args:
          first_step: step of the pipeline's first batch.
          changes: pairs of a step and the rows of each replica from that step on, in order; the first pair is that of
            `first_step` or an earlier step.
        """
        self._first_step = self._next = first_step
        self._changes = [(step, np.asarray(counts, np.int64)) for step, counts in changes]
        self._lock = threading.Lock()

    def counts(self, batch_size: int, size: int) -> None:
        """See base class: the compiled loop is traced once for any number of rows."""

    def share(self, batch: tf.Tensor, present: tf.Tensor, replica: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
        """See base class."""
        counts = tf.numpy_function(self._of_batch, [batch], tf.int64)
        return _share_of(tf.ensure_shape(counts, [size]), replica)

    @contextlib.contextmanager
    def held(self) -> Iterator[int]:
        """Context in which pipelines wait instead of allocating further batches; yields the first step not allocated."""
        with self._lock:
            yield self._next

    def change(self, step: int, counts: Sequence[int]) -> None:
        """Changes the allocation from a step on; to be called within `held`, for a step that no process has allocated."""
        assert step >= self._next
        self._changes.append((step, np.asarray(counts, np.int64)))

    def _of_batch(self, batch: np.ndarray) -> np.ndarray:
        step = self._first_step + int(batch)
        with self._lock:
            self._next = max(self._next, step + 1)
            return next(counts for since, counts in reversed(self._changes) if since <= step)


EVEN = RowAllocation()


def _share_of(counts: tf.Tensor, replica: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.cumsum(counts, exclusive=True)[replica], counts[replica]
