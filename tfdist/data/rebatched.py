"""Data that comes in batches, as Keras's `fit` takes it: `tf.data`, `keras.utils.PyDataset`, generators.

Its rows are one stream, which is cut into global batches again, so that every step has a full batch.
"""

import logging
import math
import re
import types
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.data.batches import checksum
from tfdist.data.examples import (
    Element,
    Examples,
    Transform,
    as_element,
    as_is,
    chain,
    check_element,
    spec_of_one,
    with_elements,
)
from tfdist.data.row_partition import RowPartition
from tfdist.data.source import SampleSource
from tfdist.data.stream import shares_of, transformed
from tfdist.data.structures import with_tuples, without_absent
from tfdist.errors import InputError
from tfdist.errors.engine_errors import refusal_inside

_FOREVER = 2**62  # rows of data without an end
_NO_END = "Data of unknown length needs `steps_per_epoch` (`validation_steps`, `steps`). Received: {}."
_log = logging.getLogger(__name__)

_begun: weakref.WeakKeyDictionary[keras.utils.PyDataset, int] = weakref.WeakKeyDictionary()  # their last epochs

# Returns the batches of an epoch, given its number, a scalar int64, and the seed of their order; None keeps the order.
Epoch = Callable[[tf.Tensor, int | None], tf.data.Dataset]


class BatchedSource(Examples):
    """Batches (x, y) or (x, y, sample_weight) in the order in which they come.

    A step takes the next `batch_size` rows, so that an epoch may end within a step, whose other rows are of the next
    epoch. Every process reads all batches and keeps its own rows: they must be the same on all processes. Resuming at a
    step reads and discards what precedes it in its epoch, which is exact if an epoch has the same order every time.

    Attributes:
      batch_size: rows of the first batch.
      rows: rows of an epoch of the data; None if there is no end, or it is unknown.
      can_be_read_again: whether each iterator begins with the first row; else all read from one stream.
    """

    def __init__(
        self,
        epoch: Epoch,
        first: Element,
        rows: int | None,
        *,
        epoch_rows: int | None = None,
        can_be_read_again: bool = True,
        transform: Transform = as_is,
        shuffle: bool = True,
    ):
        """Wraps the batches without reading them.

        Args:
          epoch: returns the batches of an epoch.
          first: the first batch, as arrays.
          rows: rows of an epoch; None if there is no end, or it is unknown.
          epoch_rows: rows that are counted as an epoch; by default `rows`.
          can_be_read_again: whether iterators may be created at any time, as they cannot of a Python generator.
          transform: applied to batches; see `Examples.map`.
          shuffle: whether `epoch` is given a seed.
        """
        check_element(first)
        self._epoch, self._first, self.rows, self._shuffle = epoch, first, rows, shuffle
        self.can_be_read_again, self._transform = can_be_read_again, transform
        self.size = epoch_rows or rows or _FOREVER
        self.batch_size = _count(first)

    @property
    def element_spec(self) -> Any:
        """See base class."""
        return spec_of_one(self._one_pass().map(self._transform).element_spec)

    @property
    def sample(self) -> Examples:
        """See base class: the batch that has been read, since another iterator would advance what shuffles the data."""
        return SampleSource(self._first, self._transform)

    @property
    def checksum(self) -> int:
        """See base class."""
        return checksum(self._first)

    def map(self, transform: Transform) -> "BatchedSource":
        """See base class."""
        return self._changed(chain(self._transform, transform), self._shuffle)

    def in_order(self) -> "BatchedSource":
        """See base class."""
        return self._changed(self._transform, shuffle=False)

    def indexed_batches(self, partition: RowPartition, seed: int | None) -> tf.data.Dataset:
        """See base class."""
        first, batch_size = partition.first, partition.batch_size
        if partition.total is not None:
            stream = self._one_pass().rebatch(batch_size)
            stream = stream.take(math.ceil(partition.total / batch_size))
        else:
            stream = self._from(first, seed if self._shuffle else None).rebatch(batch_size)
        numbered = stream.enumerate().map(lambda number, rows: (self._numbers(first + number * batch_size, rows), rows))
        found = numbered.enumerate().flat_map(shares_of(partition))
        found = found.apply(tf.data.experimental.assert_cardinality(partition.elements))
        return found.map(transformed(self._transform), num_parallel_calls=tf.data.AUTOTUNE)

    def explain(self, error: Exception) -> InputError | None:
        """See base class."""
        shapes = re.search(r"Source shape: (\S+), dst shape: (\S+)", str(error))
        if shapes is not None:
            return InputError(
                "Rows of batches of different shapes cannot be in one step, as where an epoch ends within a step. Received: "
                f"{shapes[1]} and {shapes[2]}. Pad all to one length, or drop the remainder: padded_batch(..., "
                "drop_remainder=True)."
            )
        return refusal_inside(error)

    def _changed(self, transform: Transform, shuffle: bool) -> "BatchedSource":
        return BatchedSource(
            self._epoch,
            self._first,
            self.rows,
            epoch_rows=self.size,
            can_be_read_again=self.can_be_read_again,
            transform=transform,
            shuffle=shuffle,
        )

    def _one_pass(self) -> tf.data.Dataset:
        """Returns the batches of one pass in their order."""
        return tf.data.Dataset.range(1).flat_map(lambda number: self._epoch(number, None))

    def _numbers(self, begin: tf.Tensor, rows: Element) -> tf.Tensor:
        """Returns the position within an epoch of each row, int64."""
        count = tf.shape(tf.nest.flatten(rows)[0], tf.int64)[0]
        return tf.range(begin, begin + count) % self.size

    def _from(self, first: int, seed: int | None) -> tf.data.Dataset:
        """Returns the endless stream of batches from a row on."""
        if self.rows is None and not self.can_be_read_again:
            epochs, into = self._one_pass(), first
        else:
            number, into = divmod(first, self.rows or _FOREVER)
            epochs = tf.data.Dataset.counter(number).flat_map(lambda epoch: self._epoch(epoch, seed))
        if not into:
            return epochs
        step = math.gcd(into, _count(self._first))  # rows are skipped in batches as large as possible
        return epochs.rebatch(step).skip(into // step)


def from_dataset(dataset: tf.data.Dataset, steps: int | None = None) -> BatchedSource:
    """Wraps a `tf.data.Dataset` of batches; reads the first one and, if nothing else tells the number of rows, all.

    Args:
      dataset: batches of any size, (x, y) or (x, y, sample_weight). Its order is kept.
      steps: batches that are counted as an epoch; required if the data has no end, by default all.

    Raises:
      InputError: there is no batch, or no end and no `steps`.
    """
    check_element(dataset.element_spec)
    if steps is None and int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise InputError(_NO_END.format("a tf.data.Dataset that repeats"))
    first = next(iter(dataset.take(1)), None)
    if first is None:
        raise InputError("A data set must have examples. Received: a tf.data.Dataset without a batch.")
    rows = keras_internals.count_rows(dataset, _count(first))
    if rows is None and steps is None:
        rows = _read_all(dataset)
    first = tf.nest.map_structure(np.asarray, first)
    return BatchedSource(lambda *_: dataset, first, rows, epoch_rows=steps and steps * _count(first))


def from_py_dataset(data: keras.utils.PyDataset, steps: int | None = None) -> BatchedSource:
    """Wraps a `keras.utils.PyDataset`; reads its first and its last batch.

    An epoch has its batches in random order, as in Keras. They are read in `data.workers` threads;
    `data.use_multiprocessing` has no effect.

    Args:
      data: batches x, (x, y) or (x, y, sample_weight), of the size of the first but for the last one.
      steps: batches that are counted as an epoch; required if the data has no end, by default all.

    Raises:
      InputError: there is no batch, or no end and no `steps`.
    """
    count = data.num_batches
    if count is None and steps is None:
        raise InputError(_NO_END.format("a PyDataset without a number of batches"))
    if count == 0:
        raise InputError("A data set must have examples. Received: a PyDataset without a batch.")
    first, last = (_as_arrays(data[index]) for index in (0, (count or 2) - 1))
    specs = tf.nest.map_structure(_spec, first, last)
    flat = tf.nest.flatten(specs)

    def read(index: np.ndarray) -> list[np.ndarray]:
        leaves = _leaves(data[int(index)])
        if count is not None and index < count - 1 and len(leaves[0]) != _count(first):
            raise InputError(
                "All batches of a PyDataset but the last must have as many rows as the first, as they are not all read to "
                f"count the rows. Received: batch {index} with {len(leaves[0])} rows, the first with {_count(first)}. "
                "Give a tf.data.Dataset of these batches, or a generator with steps_per_epoch."
            )
        return [array.astype(s.dtype.as_numpy_dtype) for array, s in zip(leaves, flat, strict=True)]

    def batch(index: tf.Tensor) -> Element:
        leaves = tf.numpy_function(read, [index], [spec.dtype for spec in flat])
        return tf.nest.pack_sequence_as(
            specs, [tf.ensure_shape(leaf, s.shape) for leaf, s in zip(leaves, flat, strict=True)]
        )

    def epoch(number: tf.Tensor, seed: int | None) -> tf.data.Dataset:
        begun = tf.numpy_function(lambda number: _begin_epoch(data, int(number)), [number], tf.int64)
        indices = tf.range(tf.constant(count or _FOREVER, tf.int64)) if count else None
        if indices is None:
            order = tf.data.Dataset.counter()
        else:
            order = indices if seed is None else tf.random.experimental.stateless_shuffle(indices, [seed, number])
            order = tf.data.Dataset.from_tensor_slices(order)
        return order.skip(begun).map(batch, num_parallel_calls=data.workers, deterministic=True)

    rows = None if count is None else (count - 1) * _count(first) + _count(last)
    return BatchedSource(epoch, first, rows, epoch_rows=steps and steps * _count(first))


def from_generator(data: Any, steps: int | None = None) -> BatchedSource:
    """Wraps a Python generator or a data loader, which one thread reads in order.

    Args:
      data: batches (x,), (x, y) or (x, y, sample_weight), of any size.
      steps: batches that are counted as an epoch; required if the data has no known end, by default all.

    Raises:
      InputError: Keras does not accept the data, or it has no end and there is no `steps`.
    """
    try:
        is_generator = isinstance(data, types.GeneratorType)
        found = keras_internals.adapted((with_tuples(without_absent(b)) for b in data) if is_generator else data)
    except ValueError as error:
        raise InputError(str(error).splitlines()[0]) from error
    if found.length is None and steps is None:
        raise InputError(_NO_END.format(f"a {type(data).__name__}"))
    batches, first = with_elements(found.batches), as_element(found.first)
    rows = None if found.length is None or steps is not None else _read_all(batches)
    return BatchedSource(
        lambda *_: batches,
        first,
        rows,
        epoch_rows=steps and steps * _count(first),
        can_be_read_again=found.can_be_read_again,
    )


def _begin_epoch(data: keras.utils.PyDataset, number: int) -> np.int64:
    """Calls the hooks of the epochs up to this one, including those that a resumed run skips; of another pass, once."""
    last = _begun.get(data, -1)
    for _ in range(max(number - last, 1)):
        if data in _begun:
            data.on_epoch_end()
        data.on_epoch_begin()
        _begun[data] = number
    return np.int64(0)


def _as_arrays(batch: Any) -> Element:
    element = as_element(with_tuples(batch))
    check_element(element)
    return tf.nest.map_structure(np.asarray, element)


def _leaves(batch: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in tf.nest.flatten(as_element(with_tuples(batch)))]


def _spec(first: np.ndarray, last: np.ndarray) -> tf.TensorSpec:
    dims = [a if a == b else None for a, b in zip(first.shape[1:], last.shape[1:], strict=True)]
    return tf.TensorSpec([None, *dims], first.dtype)


def _count(batch: Any) -> int:
    return len(tf.nest.flatten(batch)[0])


def _read_all(dataset: tf.data.Dataset) -> int:
    """Returns the number of rows of a data set of batches."""
    _log.info("Reading data of unknown size once, to count its examples. To avoid this, give steps_per_epoch.")
    rows = dataset.map(lambda *batch: tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0])
    return int(rows.reduce(tf.constant(0, tf.int64), lambda total, count: total + count))
