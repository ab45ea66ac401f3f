"""Data sets with random access: the pipeline requests examples by index."""

import abc
import functools
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.data import shuffle
from tfdist.data.batches import checksum
from tfdist.data.examples import Element, Examples, Origins, Transform, as_is, chain, check_element, spec_of_one
from tfdist.data.indexed_batch import IndexedBatch
from tfdist.data.row_partition import RowPartition
from tfdist.errors import InputError

_LOOK_AT_BYTES = 2**24  # of arrays in memory, for `Examples.look_at`


class Source(Examples):
    """Examples that can be fetched by index. Subclasses set `size` and implement `fetch`."""

    @abc.abstractmethod
    def fetch(self, indices: tf.Tensor) -> Element:
        """Returns a batch of examples; traced into tf.data's graph.

        Args:
          indices: int64 [n], in [0, size), n >= 0; may repeat.

        Returns:
          (x, y) or (x, y, sample_weight), each tensor with a first dim of n.
        """

    def map(self, transform: Transform) -> "Source":
        """See base class."""
        return Mapped(self, transform)

    def in_order(self) -> "Source":
        """See base class."""
        return InOrder(self)

    @functools.cached_property
    def element_spec(self) -> Any:
        """See base class."""
        return spec_of_one(tf.data.Dataset.range(0).batch(1).map(self._fetched).element_spec)

    def indexed_batches(self, partition: RowPartition, seed: int | None) -> tf.data.Dataset:
        """See base class."""

        def element(positions: tf.Tensor) -> IndexedBatch:
            numbers = positions if seed is None else self._numbers(positions, seed, partition.batch_size)
            return IndexedBatch(self._fetched(numbers), numbers)

        return partition.map(element)

    def look_at(self, rows: int) -> Element:
        """See base class; examples from all over the data, since those of a class are often stored together."""
        count = min(max(rows, self._rows_to_look_at), self.size)
        with tf.device("CPU:0"):
            return next(iter(tf.data.Dataset.from_tensors(_spread(count, self.size)).map(self._fetched)))

    @keras_internals.without_autograph
    def _fetched(self, indices: tf.Tensor) -> Element:
        """Calls `fetch`, which may be a user's."""
        return keras_internals.with_autograph(self.fetch)(indices)

    @property
    def _rows_to_look_at(self) -> int:
        """Number of examples that cost next to nothing to look at."""
        return 0

    def _numbers(self, positions: tf.Tensor, seed: int, span: int) -> tf.Tensor:
        """Returns the indices of the examples at positions of the endless stream of epochs."""
        return shuffle.indices(positions, self.size, seed, span=span)


class Mapped(Source):
    """A source with a transform applied to its batches."""

    def __init__(self, source: Source, transform: Transform):
        self.size = source.size
        self._source = source
        self._transform = transform

    @property
    def _rows_to_look_at(self) -> int:
        """See base class."""
        return self._source._rows_to_look_at

    def fetch(self, indices: tf.Tensor) -> Element:
        """See base class."""
        return keras_internals.with_autograph(self._transform)(*self._source._fetched(indices))

    def map(self, transform: Transform) -> Source:
        """See base class."""
        return Mapped(self._source, chain(self._transform, transform))

    @property
    def checksum(self) -> int | None:
        """See base class."""
        return self._source.checksum

    @property
    def origins(self) -> Origins | None:
        """See base class."""
        return self._source.origins

    def explain(self, error: Exception) -> InputError | None:
        """See base class."""
        return self._source.explain(error)


class InOrder(Mapped):
    """A source whose epochs are not shuffled."""

    def __init__(self, source: Source):
        super().__init__(source, as_is)

    def map(self, transform: Transform) -> Source:
        """See base class."""
        return InOrder(self._source.map(transform))

    def in_order(self) -> Source:
        """See base class."""
        return self

    def _numbers(self, positions: tf.Tensor, seed: int, span: int) -> tf.Tensor:
        return positions % self.size


class ArraySource(Source):
    """Arrays in host memory, stored once: images stay uint8 until a batch is transformed.

    As in Keras's `fit`, floating-point numbers are converted to floatx, and a pandas Series becomes a column [size, 1].
    """

    def __init__(self, arrays: Any, transform: Transform = as_is):
        """Copies the arrays.

        Args:
          arrays: (x, y) or (x, y, sample_weight), each an array [size, ...] or a structure of arrays.
          transform: applied to batches; see `Examples.map`.

        Raises:
          InputError: `arrays` is something else, or the arrays are empty or of different sizes.
        """
        check_element(arrays)
        leaves = [self._array_of(leaf) for leaf in tf.nest.flatten(arrays)]
        sizes = sorted({leaf.shape[0] if leaf.ndim else 0 for leaf in leaves})
        if len(sizes) != 1 or sizes[0] == 0:
            shapes = ", ".join(str(leaf.shape) for leaf in leaves)
            if sizes == [0] and all(leaf.ndim for leaf in leaves):
                raise InputError(
                    f"The data is empty, but must have at least 1 example. Received: arrays of shapes {shapes}."
                )
            raise InputError(f"Arrays must have the same first dim, at least 1. Received: shapes {shapes or 'none'}.")
        with tf.device("CPU:0"):
            self._tensors = tf.nest.pack_sequence_as(arrays, [_constant(leaf) for leaf in leaves])
        self.size = sizes[0]
        self._transform = transform
        self._bytes = sum(leaf.nbytes for leaf in leaves)

    def fetch(self, indices: tf.Tensor) -> Element:
        """See base class."""
        gathered = tf.nest.map_structure(lambda tensor: tf.gather(tensor, indices), self._tensors)
        return keras_internals.with_autograph(self._transform)(*gathered)

    def _array_of(self, data: Any) -> np.ndarray:
        return keras_internals.array_of(data)

    @property
    def checksum(self) -> int:
        """See base class; of examples from all over the arrays, which are all if they are small."""
        indices = _spread(max(1, self._rows_to_look_at), self.size)
        with tf.device("CPU:0"):
            return checksum(tf.nest.map_structure(lambda tensor: tf.gather(tensor, indices), self._tensors))

    @property
    def _rows_to_look_at(self) -> int:
        """See base class."""
        return self.size * _LOOK_AT_BYTES // max(self._bytes, _LOOK_AT_BYTES)


class SampleSource(ArraySource):
    """Examples of a data set that is read otherwise, in the dtypes that it has."""

    def _array_of(self, data: Any) -> np.ndarray:
        return np.asarray(data)


def _spread(count: int, size: int) -> tf.Tensor:
    """Returns the indices of `count` of `size` examples, at equal distances."""
    return tf.constant(np.arange(count, dtype=np.int64) * size // count)


def _constant(array: np.ndarray) -> tf.Tensor:
    try:
        return tf.constant(array)
    except (TypeError, ValueError) as error:
        kinds = sorted({type(value).__name__ for value in array.flat}) if array.dtype == object else [str(array.dtype)]
        raise InputError(
            f"Arrays must hold numbers, or text only. Received: an array of shape {array.shape} with values of "
            f"{' and '.join(kinds)}. Replace missing values, and give each column of a table its own array."
        ) from error
