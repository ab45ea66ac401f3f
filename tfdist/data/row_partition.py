"""Partition of the rows of global batches among replicas: structures of arrays, numbers of rows, and their order."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.errors import InputError

ABSENT = tf.qint8  # marks None in an element of a data set: no data has this dtype


def with_tuples(arrays: Any) -> Any:
    """Returns a structure with tuples instead of lists of arrays, since tf.data turns a list into one tensor.

    Other lists, such as those of numbers, are left as they are.
    """
    if isinstance(arrays, dict):
        return {name: with_tuples(part) for name, part in arrays.items()}
    if type(arrays) is tuple or (isinstance(arrays, list) and has_arrays(arrays)):
        return tuple(with_tuples(part) for part in arrays)
    return arrays


def has_arrays(parts: Any) -> bool:
    """Returns whether a tuple, list or dict has an array of rows, or a structure with one, rather than numbers or text."""
    values = parts.values() if isinstance(parts, dict) else parts
    return any(
        has_arrays(value) if isinstance(value, tuple | list | dict) else bool(getattr(value, "shape", ()))
        for value in values
    )


def with_none(batch: Any) -> Any:
    """Returns a structure with None for absent parts, as Keras's adapters mark them, or as `without_none` does."""

    def leaf_or_none(leaf: Any) -> Any:
        is_absent = isinstance(leaf, tf.experimental.Optional) or getattr(leaf, "dtype", None) == ABSENT
        return None if is_absent else leaf

    return tf.nest.map_structure(leaf_or_none, batch)


def without_absent(batch: Any) -> Any:
    """Returns a batch or an example, without the parts at its end that are None if it is a tuple or a list."""
    while isinstance(batch, tuple | list) and len(batch) > 1 and batch[-1] is None:
        batch = batch[:-1]
    return batch


def without_none(batch: Any) -> Any:
    """Inverse of `with_none`: tf.distribute takes neither None nor `Optional`."""
    absent = tf.zeros([0], tf.int8)
    return tf.nest.map_structure(lambda leaf: tf.bitcast(absent, ABSENT) if leaf is None else leaf, batch)


class IndexedBatch(NamedTuple):
    """A batch as passed to the replicas of a run that keeps a ledger.

    Attributes:
      batch: the batched examples, (x, y) or (x, y, sample_weight).
      numbers: int64 [rows], index of each example in the natural order of its data set, from 0.
    """

    batch: Any
    numbers: tf.Tensor


class ReplicaRows(NamedTuple):
    """The rows of a global batch that one replica computes: at least one, as code of users and of Keras expects.

    A replica without an own row computes the last row of the batch, which any model accepts that accepts the batch.
    It takes part in each call of the step, but its results do not count: neither losses, gradients, metrics and statistics,
    nor values that are communicated (`CountedRows`), nor outputs.

    Attributes:
      batch: structure of tensors, whose first dim is at least 1.
      counts: scalars int32, for each tensor of the batch, or one for all: the number of rows that count, 0 if the replica has
        no row of its own.
      batch_size: scalar int32; rows of the global batch.
    """

    batch: Any
    counts: tuple[tf.Tensor, ...]
    batch_size: tf.Tensor

    @property
    def rows(self) -> tf.Tensor:
        """The number of rows that count, those of the first tensor."""
        return self.counts[0]

    @property
    def own(self) -> Any:
        """The rows that count, of which there may be none, given a count for each tensor."""
        counts = iter(self.counts)
        return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[: next(counts)], self.batch)


# Allocations: how many rows of a global batch each replica computes; the rows of a replica are consecutive.
# The loss divides by the rows of the whole batch, so that the allocation affects results by rounding only.


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


def computed_range(first: tf.Tensor, count: tf.Tensor, present: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
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
    that no pipeline has allocated, which `paused` returns, so that every process allocates each batch once and in the same way.
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
    def paused(self) -> Iterator[int]:
        """Context in which pipelines wait instead of allocating further batches; yields the first step not allocated."""
        with self._lock:
            yield self._next

    def change(self, step: int, counts: Sequence[int]) -> None:
        """Changes the allocation from a step on; to be called within `paused`, for a step that no process has allocated."""
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


MICRO_STEPS = "micro-steps"


def check_equal_shares(batch_size: int, replicas: int, micro_steps: int = 1, name: str = MICRO_STEPS) -> None:
    """Checks that every replica gets the same number of rows in each micro-step, for strategies with static shapes.

    Args:
      batch_size: global batch size.
      replicas: number of replicas.
      micro_steps: micro-steps per step.
      name: the term for them, for the error.

    Raises:
      InputError: the batch size does not allow it.
    """
    shares = replicas * micro_steps
    if batch_size % shares:
        below = batch_size - batch_size % shares
        near = " or ".join(str(size) for size in (below, below + shares) if size)
        raise InputError(
            f"--batch_size must be divisible by the number of {shares_text(micro_steps, name)} for this strategy. "
            f"Received: --batch_size={batch_size} and {replicas_text(replicas, micro_steps, name)}. Use {near}."
        )


def shares_text(micro_steps: int, name: str = MICRO_STEPS) -> str:
    """Returns the text for the parts that share a batch, for messages."""
    return f"replicas times that of {name}" if micro_steps > 1 else "replicas"


def replicas_text(replicas: int, micro_steps: int, name: str = MICRO_STEPS) -> str:
    """Returns the text for the numbers of replicas and micro-steps, for messages."""
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
        return *computed_range(first, count, present), count

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
