"""Partitions the rows of global batches among replicas."""

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.errors import InputError

ABSENT = tf.qint8  # marks None in an element of a dataset; no data has this dtype


def with_tuples(arrays: Any) -> Any:
    """Returns a structure with tuples instead of lists of arrays, because tf.data converts a list to one tensor.

    Other lists, such as those of numbers, are unchanged.
    """
    if isinstance(arrays, dict):
        return {name: with_tuples(part) for name, part in arrays.items()}
    if type(arrays) is tuple or (isinstance(arrays, list) and has_arrays(arrays)):
        return tuple(with_tuples(part) for part in arrays)
    return arrays


def has_arrays(parts: Any) -> bool:
    """Returns whether a tuple, list or dict contains an array, possibly nested, rather than only numbers or text."""
    values = parts.values() if isinstance(parts, dict) else parts
    return any(
        has_arrays(value) if isinstance(value, tuple | list | dict) else bool(getattr(value, "shape", ()))
        for value in values
    )


def restore_none(batch: Any) -> Any:
    """Returns a structure with None in place of the marks that Keras's adapters or `mark_none` have set for None."""

    def leaf_or_none(leaf: Any) -> Any:
        is_absent = isinstance(leaf, tf.experimental.Optional) or getattr(leaf, "dtype", None) == ABSENT
        return None if is_absent else leaf

    return tf.nest.map_structure(leaf_or_none, batch)


def strip_none(batch: Any) -> Any:
    """Returns a batch or an example; trailing None is removed from a tuple or a list."""
    while isinstance(batch, tuple | list) and len(batch) > 1 and batch[-1] is None:
        batch = batch[:-1]
    return batch


def mark_none(batch: Any) -> Any:
    """Replaces None by a mark, which `restore_none` reverts, because tf.distribute accepts neither None nor `Optional`."""
    absent_value = tf.zeros([0], tf.int8)
    return tf.nest.map_structure(lambda leaf: tf.bitcast(absent_value, ABSENT) if leaf is None else leaf, batch)


class IndexedBatch(NamedTuple):
    """A batch with the indices of its examples."""

    batch: Any  # the batched examples, (x, y) or (x, y, sample_weight)
    indices: tf.Tensor  # int64 [rows], index of each example in the natural order of its dataset


class ReplicaRows(NamedTuple):
    """The rows of a global batch that one replica computes, at least one, as Keras and user code expect.

    A replica without counted rows computes the last row of the batch as padding. It takes part in each call of the step,
    but its losses, gradients, metrics, statistics, communicated values (`MaskedCollectives`) and outputs are ignored.
    """

    batch: Any  # structure of tensors, whose first dim is at least 1
    # Number of counted rows, 0 if there is only padding; scalar int32, for each tensor of the batch or one for all.
    counts: tuple[tf.Tensor, ...]
    batch_size: tf.Tensor  # scalar int32; number of rows of the global batch

    @property
    def rows(self) -> tf.Tensor:
        """The number of counted rows of the first tensor."""
        return self.counts[0]

    @property
    def counted_rows(self) -> Any:
        """The counted rows, possibly none."""
        counts = iter(self.counts) if len(self.counts) > 1 else itertools.repeat(self.rows)
        return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[: next(counts)], self.batch)


# An allocation is the number of rows of a global batch that each replica computes; the rows of a replica are consecutive.
# The loss is divided by the number of rows of the global batch, so the allocation affects results by rounding only.


def row_range(batch_size: int, replica: int, replicas: int) -> tuple[int, int]:
    """Returns one replica's first row and number of rows, if a batch is allocated as evenly as possible.

    The number of rows is batch_size // replicas or one more.
    """
    quotient, extra = divmod(batch_size, replicas)
    return replica * quotient + min(replica, extra), quotient + (replica < extra)


def traced_row_range(batch_size: tf.Tensor, replica: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Same as `row_range`, with tensors."""
    quotient, extra = batch_size // size, batch_size % size
    return replica * quotient + tf.minimum(replica, extra), quotient + tf.cast(replica < extra, batch_size.dtype)


def replica_range(first: tf.Tensor, count: tf.Tensor, batch_size: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the start and end of the rows that a replica computes: its counted rows or, if it has none, the last row."""
    begin = tf.minimum(first, batch_size - 1)
    return begin, begin + tf.maximum(count, 1)


def apportion(batch_size: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divides rows in proportion to positive weights by the largest-remainder method; each weight gets at least one row."""
    quotas = [batch_size * weight / sum(weights) for weight in weights]
    counts = [max(int(quota), 1) for quota in quotas]
    while sum(counts) < batch_size:
        deficits = [quota - count for quota, count in zip(quotas, counts, strict=True)]
        counts[deficits.index(max(deficits))] += 1
    while sum(counts) > batch_size:
        excesses = [count - quota if count > 1 else -np.inf for quota, count in zip(quotas, counts, strict=True)]
        counts[excesses.index(max(excesses))] -= 1
    return tuple(counts)


class RowAllocation:
    """Allocates a fixed number of rows of each full batch to each replica; by default, allocates batches evenly."""

    def __init__(self, counts: Sequence[int] = ()):
        """Initializes the allocation with each replica's number of rows, at least 1; empty for an even allocation."""
        self._counts = tuple(counts)

    def counts(self, batch_size: int, size: int) -> tuple[int, ...] | None:
        """Returns the number of rows of each of `size` replicas in a full batch; None if it may change."""
        return self._counts or tuple(row_range(batch_size, replica, size)[1] for replica in range(size))

    def row_range(
        self, batch: tf.Tensor, rows: tf.Tensor, replica: tf.Tensor, size: int
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns one replica's first row and number of rows, int64 scalars; traced into tf.data's graph.

        `batch` is the batch's index in the pipeline, `rows` its number of rows; these and `replica` are int64 scalars.
        """
        counts = self._traced_counts(batch, size)
        if counts is None:
            return traced_row_range(rows, replica, size)
        return tf.cumsum(counts, exclusive=True)[replica], counts[replica]

    def _traced_counts(self, batch: tf.Tensor, size: int) -> tf.Tensor | None:
        return tf.constant(self._counts, tf.int64) if self._counts else None


class ChangingAllocation(RowAllocation):
    """An allocation of full batches that may change from any step on that no pipeline has allocated yet.

    The pipelines of the processes prefetch up to different steps. A change takes effect at the first step that no
    pipeline has allocated (see `pause`), so every process allocates each batch once and in the same way.
    """

    def __init__(self, first_step: int, changes: Sequence[tuple[int, Sequence[int]]]):
        """Initializes the allocation.

        Args:
          first_step: step of the pipeline's first batch.
          changes: pairs (step, number of rows of each replica from that step on), in order. The first step must not be
            after `first_step`.
        """
        super().__init__()
        self._first_step = self._next_step = first_step
        self._changes = [(step, np.asarray(counts, np.int64)) for step, counts in changes]
        self._lock = threading.Lock()

    def counts(self, batch_size: int, size: int) -> None:
        """See base class. Returns None, so that the compiled loop is traced once for any number of rows."""

    def _traced_counts(self, batch: tf.Tensor, size: int) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(self._batch_counts, [batch], tf.int64), [size])

    @contextlib.contextmanager
    def pause(self) -> Iterator[int]:
        """Makes pipelines wait before they allocate further batches; yields the first step that is not allocated."""
        with self._lock:
            yield self._next_step

    def change(self, step: int, counts: Sequence[int]) -> None:
        """Changes the allocation from a step on. Must be called within `pause`; no process may have allocated the step."""
        assert step >= self._next_step
        self._changes.append((step, np.asarray(counts, np.int64)))

    def _batch_counts(self, batch: np.ndarray) -> np.ndarray:
        step = self._first_step + int(batch)
        with self._lock:
            self._next_step = max(self._next_step, step + 1)
            return next(counts for start, counts in reversed(self._changes) if start <= step)


EVEN = RowAllocation()


def check_batch_size(
    batch_size: int, replicas: int, micro_steps: int = 1, equal: bool = False, name: str = "micro-steps"
) -> None:
    """Raises `InputError` unless every replica has a row in each micro-step; if `equal`, all must have the same number.

    On a mesh, a replica is a device along the batch's axis. `name` is the term for micro-steps in the error.
    """
    divisor = replicas * micro_steps
    if batch_size >= divisor and not (equal and batch_size % divisor):
        return
    lower = batch_size - batch_size % divisor
    alternatives = " or ".join(str(size) for size in (lower, lower + divisor) if size)
    rule = f"{'divisible by' if equal else 'at least'} the number of replicas"
    times, of_each = (f" times that of {name}", f" of {micro_steps} {name} each") if micro_steps > 1 else ("", "")
    raise InputError(
        f"--batch_size must be {rule}{times}{' for this strategy' if equal else ''}. Received: --batch_size={batch_size} and "
        f"{replicas} replica{'s' * (replicas != 1)}{of_each}. Use {alternatives}."
    )


@dataclasses.dataclass(frozen=True)
class RowPartition:
    """Maps each element of one process's dataset to the positions in the stream that it covers.

    Element i belongs to batch `i // len(replicas)` and to replica `replicas[i % len(replicas)]`.
    """

    batch_size: int  # number of rows of a global batch
    replicas: tuple[int, ...]  # indices of this process's replicas, in order
    size: int  # total number of replicas
    first: int = 0  # position at which the first batch begins
    total: int | None = None  # end of the stream (exclusive), where a batch may be short; None for an endless stream
    allocation: RowAllocation = EVEN  # number of rows of each replica; must be even for a finite stream

    @property
    def elements(self) -> int:
        """Number of elements; `tf.data.INFINITE_CARDINALITY` if the stream is endless."""
        if self.total is None:
            return tf.data.INFINITE_CARDINALITY
        return -((self.first - self.total) // self.batch_size) * len(self.replicas)

    @property
    def static_count(self) -> int | None:
        """Number of rows in every element, at least 1, or None if it varies."""
        replica_counts = self.allocation.counts(self.batch_size, self.size)
        counts = {max(replica_counts[replica], 1) for replica in self.replicas} if replica_counts else set()
        is_short = self.total is not None and (self.total - self.first) % self.batch_size
        return None if is_short or len(counts) != 1 else counts.pop()

    def replica_rows(self, batch: tf.Tensor, index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the start and end of the rows of `replicas[index]`, and its number of counted rows, int64 scalars."""
        row_count, replica = self._row_count(batch), tf.constant(self.replicas, tf.int64)[index]
        first, count = self.allocation.row_range(batch, row_count, replica, self.size)
        return *replica_range(first, count, row_count), count

    def counts(self, element: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the number of counted rows of an element, and the number of rows of its batch, int32 scalars."""
        batch = element // len(self.replicas)
        *_, count = self.replica_rows(batch, element % len(self.replicas))
        return tf.cast(count, tf.int32), tf.cast(self._row_count(batch), tf.int32)

    def positions(self, element: tf.Tensor) -> tf.Tensor:
        """Returns the positions of the rows in an element, int64 [rows]."""
        batch = element // len(self.replicas)
        begin, end, _ = self.replica_rows(batch, element % len(self.replicas))
        start = self._start(batch)
        return tf.ensure_shape(tf.range(start + begin, start + end), [self.static_count])

    def map(self, function: Callable[[tf.Tensor], Any]) -> tf.data.Dataset:
        """Returns a dataset of the results of `function` for the positions of each element."""
        elements = tf.data.Dataset.counter() if self.total is None else tf.data.Dataset.range(self.elements)
        element_function = keras_internals.without_autograph(lambda element: function(self.positions(element)))
        return elements.map(element_function, num_parallel_calls=tf.data.AUTOTUNE)

    def _row_count(self, batch: tf.Tensor) -> tf.Tensor:
        full_size = tf.constant(self.batch_size, tf.int64)
        return full_size if self.total is None else tf.minimum(full_size, self.total - self._start(batch))

    def _start(self, batch: tf.Tensor) -> tf.Tensor:
        return self.first + batch * self.batch_size
