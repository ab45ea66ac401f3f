"""Examples with random access, whose order is a pure function of the seed and the position in the stream."""

import abc
import fractions
import functools
import math
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.data.batches import checksum
from tfdist.data.examples import Element, Examples, Transform, check_element, identity, unbatched_spec
from tfdist.data.row_partition import IndexedBatch, RowPartition
from tfdist.errors import InputError, is_number

# The public `tf.random.experimental.index_shuffle` uses 4 rounds of the same cipher. With 4 rounds, permutations of 60000
# elements under adjacent seeds have a correlation of 0.9; with 8, permutations of 2**24 elements still do not look random.
ROUNDS = 12
_PHILOX = 1
_WORDS_PER_BLOCK = 4


def indices(positions: tf.Tensor, size: int, seed: int, span: int | None = None) -> tf.Tensor:
    """Returns the indices of the examples at consecutive positions of the stream.

    Each epoch has its own permutation, a function of (seed, epoch), which is not stored. Cost: about
    max(1, 2**16 / size) evaluations of a cipher per index, about 20 ns each.

    Args:
      positions: int64 [n], n > 0, consecutive and ascending.
      size: number of examples per epoch, at least 1.
      seed: any integer, used modulo 2**64.
      span: upper bound of n if n is not static.

    Returns:
      int64 [n], in [0, size).
    """
    epochs = positions // size
    first_epoch = epochs[0]
    max_positions = positions.shape[0] or span
    if max_positions is None:
        raise ValueError("The number of positions must be static, or bounded by `span`. Received: neither.")
    # For small permutations, the cipher uses only the low bits of its key, so consecutive keys would repeat after 256 epochs.
    counter = tf.stack([tf.cast(first_epoch, tf.uint64), tf.constant(0, tf.uint64)])
    max_epochs = (max_positions + size - 2) // size + 1
    keys = tf.gather(random_keys(max_epochs, seed, counter), epochs - first_epoch)
    max_index = tf.constant(size - 1, tf.int64)
    return tf.raw_ops.RandomIndexShuffle(index=positions % size, seed=keys, max_index=max_index, rounds=ROUNDS)


def steps_in_epochs(epochs: float, size: int, batch_size: int) -> int:
    """Returns the number of steps that use every example of some epochs; the last step may extend into the next epoch.

    Args:
      epochs: number of passes over the data, at least 0; may be fractional.
      size: number of examples per epoch.
      batch_size: global batch size.
    """
    return math.ceil(fractions.Fraction(str(epochs)) * size / batch_size)


def random_keys(count: int, seed: int, counter: tf.Tensor) -> tf.Tensor:
    """Returns keys for permutations, uint32 [count, 3]: Philox blocks with the key `seed` from `counter` on, uint64 [2]."""
    blocks = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[count, _WORDS_PER_BLOCK],
        key=tf.constant([seed % 2**64], tf.uint64),
        counter=counter,
        alg=tf.constant(_PHILOX),
        dtype=tf.uint32,
    )
    return blocks[:, :3]


_PREVIEW_BYTES = 2**24  # maximum size of a preview of arrays in memory


class Source(Examples):
    """Examples that can be fetched by index. Subclasses set `size` and implement `fetch`."""

    @abc.abstractmethod
    def fetch(self, indices: tf.Tensor) -> Element:
        """Returns a batch of examples; traced into tf.data's graph.

        Args:
          indices: int64 [n], n >= 0, in [0, size), possibly with repetitions.

        Returns:
          (x, y) or (x, y, sample_weight), each tensor with a first dim of n.
        """

    @functools.cached_property
    def element_spec(self) -> Any:
        return unbatched_spec(tf.data.Dataset.range(0).batch(1).map(self._fetch).element_spec)

    def indexed_batches(self, partition: RowPartition, seed: int | None) -> tf.data.Dataset:
        def element(positions: tf.Tensor) -> IndexedBatch:
            if seed is None:
                batch_indices = positions
            elif self._shuffle:
                batch_indices = indices(positions, self.size, seed, span=partition.batch_size)
            else:
                batch_indices = positions % self.size
            return IndexedBatch(self._fetch(batch_indices), batch_indices)

        return partition.map(element)

    def preview(self, rows: int) -> Element:
        """See base class. The examples are evenly spaced, because the examples of a class are often stored together."""
        count = min(max(rows, self._preview_rows), self.size)
        with tf.device("CPU:0"):
            return next(iter(tf.data.Dataset.from_tensors(_evenly_spaced_indices(count, self.size)).map(self._fetch)))

    @keras_internals.without_autograph
    def _fetch(self, indices: tf.Tensor) -> Element:
        """Calls `fetch` and the transform with AutoGraph, because a user may have written them."""
        element = keras_internals.with_autograph(self.fetch)(indices)
        return element if self._transform is identity else keras_internals.with_autograph(self._transform)(*element)

    @property
    def _preview_rows(self) -> int:
        """Number of examples that a preview can read at almost no cost."""
        return 0


class ArraySource(Source):
    """Examples from arrays in host memory; uint8 images are converted only when a batch is transformed.

    As in Keras's `fit`, floating-point numbers are converted to floatx, and a pandas Series becomes a column [size, 1].
    """

    def __init__(self, arrays: Any, transform: Transform = identity):
        """Copies the arrays.

        Args:
          arrays: (x, y) or (x, y, sample_weight), each an array [size, ...] or a structure of arrays.
          transform: transform of batches; see `Examples.map`.

        Raises:
          InputError: `arrays` is not of this form, or the arrays are empty or of different sizes.
        """
        check_element(arrays)
        leaves = [self._as_array(leaf) for leaf in tf.nest.flatten(arrays)]
        sizes = sorted({leaf.shape[0] if leaf.ndim else 0 for leaf in leaves})
        if len(sizes) != 1 or sizes[0] == 0:
            received = f"shapes {', '.join(str(leaf.shape) for leaf in leaves)}" if leaves else "no arrays"
            if sizes == [0] and all(leaf.ndim for leaf in leaves):
                raise InputError(
                    f"The data is empty, but must have at least 1 example. Received: arrays of {received}."
                )
            raise InputError(f"Arrays must have the same first dim, at least 1. Received: {received}.")
        with tf.device("CPU:0"):
            self._tensors = tf.nest.pack_sequence_as(arrays, [_constant(leaf) for leaf in leaves])
        self.size = sizes[0]
        self._transform = transform
        self._bytes = sum(leaf.nbytes for leaf in leaves)

    def fetch(self, indices: tf.Tensor) -> Element:
        return tf.nest.map_structure(lambda tensor: tf.gather(tensor, indices), self._tensors)

    def _as_array(self, data: Any) -> np.ndarray:
        return keras_internals.array_of(data)

    @property
    def checksum(self) -> int:
        """See base class. Covers evenly spaced examples, or all examples if the arrays are small."""
        indices = _evenly_spaced_indices(max(1, self._preview_rows), self.size)
        with tf.device("CPU:0"):
            return checksum(tf.nest.map_structure(lambda tensor: tf.gather(tensor, indices), self._tensors))

    @property
    def _preview_rows(self) -> int:
        return self.size * _PREVIEW_BYTES // max(self._bytes, _PREVIEW_BYTES)


def _evenly_spaced_indices(count: int, size: int) -> tf.Tensor:
    return tf.constant(np.arange(count, dtype=np.int64) * size // count)


def _constant(array: np.ndarray) -> tf.Tensor:
    try:
        return tf.constant(array)
    except (TypeError, ValueError) as error:
        kinds = sorted({type(value).__name__ for value in array.flat}) if array.dtype == object else [str(array.dtype)]
        raise InputError(
            f"An array must contain only numbers or only text. Received: an array of shape {array.shape} with values of "
            f"{' and '.join(kinds)}. Replace missing values, and pass each column of a table as a separate array."
        ) from error


def stratified_split(labels: np.ndarray, test_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits examples into training and test examples, so that each class has nearly the same proportion in both.

    Returns the indices of the training examples and of the test examples, each in random order. `labels` are integers [n].
    """
    generator = np.random.Generator(np.random.PCG64(0))
    keys = generator.random(len(labels))
    order = np.lexsort((keys, labels))
    steps = np.arange(len(labels) + 1) * test_size // len(labels)
    is_test = steps[1:] > steps[:-1]  # every (n / test_size)-th example, ordered by class
    train, test = order[~is_test], order[is_test]
    return train[np.argsort(keys[train])], test[np.argsort(keys[test])]


def split_indices(labels: np.ndarray, fraction: float, test: object = None) -> tuple[np.ndarray, np.ndarray]:
    """Splits off a fraction of the examples for validation with `stratified_split`; always the same examples.

    Args:
      labels: integers [n]; all equal to ignore classes.
      fraction: fraction of the examples, in [0, 1).
      test: name of the test data, if there is any; `fraction` must then be 0.

    Returns:
      The indices of the training examples and of the validation examples, both ascending.

    Raises:
      InputError: the fraction is out of range, or leaves no examples for training or for validation.
    """
    if test and fraction:
        raise InputError(
            f"Test data and validation_split are mutually exclusive. Received: {test} and {fraction}. Remove one of them."
        )
    if not is_number(fraction) or not 0 <= fraction < 1:
        raise InputError(f"validation_split must be a fraction in [0, 1). Received: {fraction!r}.")
    if not fraction:
        return np.arange(len(labels)), np.arange(0)
    count = round(len(labels) * fraction)
    if not 0 < count < len(labels):
        raise InputError(
            f"validation_split must leave examples for training and test. Received: {fraction} of {len(labels)} examples."
        )
    train, validation = stratified_split(labels, count)
    return np.sort(train), np.sort(validation)
