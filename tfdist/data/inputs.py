"""Converts the arrays, datasets and generators that Keras's `fit`, `evaluate` and `predict` accept to `Examples`."""

import contextlib
import dataclasses
import logging
import math
import re
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.data.batches import checksum
from tfdist.data.examples import (
    DatasetSplits,
    Element,
    Examples,
    as_element,
    check_element,
    map_to_elements,
    without_targets,
)
from tfdist.data.row_partition import RowPartition, has_arrays, strip_none, with_tuples
from tfdist.data.source import ArraySource, Source
from tfdist.data.stream import SequentialExamples, StreamSource
from tfdist.errors import InputError, nested_input_error

# The rows of batched data (`tf.data`, `keras.utils.PyDataset`, generators) are treated as one stream and rebatched into
# global batches, so that every step has a full batch.

_INFINITE_ROWS = 2**62  # number of rows of infinite data
_UNKNOWN_LENGTH = "Data of unknown length needs `steps_per_epoch` (`validation_steps`, `steps`). Received: {}."
_log = logging.getLogger(__name__)

_last_epochs: weakref.WeakKeyDictionary[keras.utils.PyDataset, int] = weakref.WeakKeyDictionary()

# Returns the batches of an epoch, given its index, a scalar int64, and the seed of its order or None.
EpochFn = Callable[[tf.Tensor, int | None], tf.data.Dataset]


class _Sample(ArraySource):
    """A sample of a dataset, in its original dtypes."""

    def _as_array(self, data: Any) -> np.ndarray:
        return np.asarray(data)


class BatchedSource(SequentialExamples):
    """Batches (x, y) or (x, y, sample_weight), in the order of the data.

    A step takes the next `batch_size` rows, so a step may contain the end of an epoch and the beginning of the next one.
    The batches must be the same on all processes. Resuming is exact if the order of an epoch is reproducible.
    """

    def __init__(
        self, epoch: EpochFn, first: Element, rows: int | None, steps: int | None = None, is_reiterable: bool = True
    ):
        """Wraps the batches without reading them.

        Args:
          epoch: returns the batches of an epoch.
          first: the first batch, as arrays.
          rows: number of rows of an epoch; None if infinite or unknown.
          steps: number of batches, of the size of the first batch, that count as an epoch; by default all batches.
          is_reiterable: whether the data can be iterated several times, unlike a Python generator.
        """
        check_element(first)
        self._epoch, self._first, self.rows, self.is_reiterable = epoch, first, rows, is_reiterable
        self.batch_size = _count_rows(first)
        self.size = (steps * self.batch_size if steps else rows) or _INFINITE_ROWS

    @property
    def sample(self) -> Examples:
        """See base class: the first batch, since another iterator would advance the shuffling of the data."""
        return _Sample(self._first, self._transform)

    @property
    def checksum(self) -> int:
        return checksum(self._first)

    def _global_batches(self, partition: RowPartition, seed: int | None) -> tf.data.Dataset:
        first, batch_size = partition.first, partition.batch_size
        if partition.total is not None:
            stream = self._batches().rebatch(batch_size).take(math.ceil(partition.total / batch_size))
        else:
            stream = self._stream_from(first, seed if self._shuffle else None).rebatch(batch_size)

        def with_positions(batch_index: tf.Tensor, rows: Element) -> tuple[tf.Tensor, Element]:
            begin = first + batch_index * batch_size
            return tf.range(begin, begin + tf.shape(tf.nest.flatten(rows)[0], tf.int64)[0]) % self.size, rows

        return stream.enumerate().map(with_positions)

    def explain(self, error: Exception) -> InputError | None:
        shapes = re.search(r"Source shape: (\S+), dst shape: (\S+)", str(error))
        if shapes is not None:
            return InputError(
                "A step cannot combine rows of different shapes, for example where an epoch ends within a step. Received: "
                f"{shapes[1]} and {shapes[2]}. Pad all rows to one length, or drop the last, incomplete batch: "
                "padded_batch(..., drop_remainder=True)."
            )
        return nested_input_error(error)

    def _batches(self) -> tf.data.Dataset:
        return tf.data.Dataset.range(1).flat_map(lambda index: self._epoch(index, None))

    def _stream_from(self, first: int, seed: int | None) -> tf.data.Dataset:
        if self.rows is None and not self.is_reiterable:
            epochs, offset = self._batches(), first
        else:
            first_epoch, offset = divmod(first, self.rows or _INFINITE_ROWS)
            epochs = tf.data.Dataset.counter(first_epoch).flat_map(lambda index: self._epoch(index, seed))
        if not offset:
            return epochs
        batch_size = math.gcd(offset, _count_rows(self._first))  # skips rows in batches as large as possible
        return epochs.rebatch(batch_size).skip(offset // batch_size)


def from_dataset(dataset: tf.data.Dataset, steps: int | None = None) -> BatchedSource:
    """Wraps a `tf.data.Dataset` of batches of any size; reads the first batch, or all if the number of rows is unknown.

    The order of the batches is kept. `steps` batches count as an epoch; by default all batches.

    Raises:
      InputError: the data is empty, or infinite without `steps`.
    """
    check_element(dataset.element_spec)
    if steps is None and int(dataset.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise InputError(_UNKNOWN_LENGTH.format("a tf.data.Dataset that repeats"))
    first_batch = next(iter(dataset.take(1)), None)
    if first_batch is None:
        raise InputError("A dataset must have examples. Received: an empty tf.data.Dataset.")
    rows = keras_internals.count_rows(dataset, _count_rows(first_batch))
    if rows is None and steps is None:
        rows = _count_by_reading(dataset)
    first_batch = tf.nest.map_structure(np.asarray, first_batch)
    return BatchedSource(lambda *_: dataset, first_batch, rows, steps)


def from_py_dataset(data: keras.utils.PyDataset, steps: int | None = None) -> BatchedSource:
    """Wraps a `keras.utils.PyDataset`; reads its first and its last batch.

    All batches but the last must have the same size. As in Keras, their order is random in each epoch. `data.workers`
    threads read them; `data.use_multiprocessing` has no effect. `steps` batches count as an epoch; by default all batches.

    Raises:
      InputError: the data is empty, or infinite without `steps`.
    """
    count = data.num_batches
    if count is None and steps is None:
        raise InputError(_UNKNOWN_LENGTH.format("a PyDataset without a number of batches"))
    if count == 0:
        raise InputError("A dataset must have examples. Received: an empty PyDataset.")
    first_batch, last_batch = (_as_arrays(data[index]) for index in (0, (count or 2) - 1))

    def common_spec(first: np.ndarray, last: np.ndarray) -> tf.TensorSpec:
        dims = [a if a == b else None for a, b in zip(first.shape[1:], last.shape[1:], strict=True)]
        return tf.TensorSpec([None, *dims], first.dtype)

    specs = tf.nest.map_structure(common_spec, first_batch, last_batch)
    flat_specs = tf.nest.flatten(specs)

    def read(index: np.ndarray) -> list[np.ndarray]:
        leaves = tf.nest.flatten(_as_arrays(data[int(index)]))
        if count is not None and index < count - 1 and len(leaves[0]) != _count_rows(first_batch):
            raise InputError(
                "All batches of a PyDataset but the last must have as many rows as the first. Received: batch "
                f"{index} with {len(leaves[0])} rows. Pass a tf.data.Dataset of these batches, or a generator."
            )
        return [array.astype(s.dtype.as_numpy_dtype) for array, s in zip(leaves, flat_specs, strict=True)]

    def batch(index: tf.Tensor) -> Element:
        leaves = tf.numpy_function(read, [index], [spec.dtype for spec in flat_specs])
        leaves = [tf.ensure_shape(leaf, s.shape) for leaf, s in zip(leaves, flat_specs, strict=True)]
        return tf.nest.pack_sequence_as(specs, leaves)

    def epoch(epoch_index: tf.Tensor, seed: int | None) -> tf.data.Dataset:
        # Always 0. Skipping this many elements makes the order depend on the hooks, so they are called first.
        zero = tf.numpy_function(lambda index: _begin_epoch(data, int(index)), [epoch_index], tf.int64)
        if count is None:
            order = tf.data.Dataset.counter()
        else:
            indices = tf.range(tf.constant(count, tf.int64))
            order = indices if seed is None else tf.random.experimental.stateless_shuffle(indices, [seed, epoch_index])
            order = tf.data.Dataset.from_tensor_slices(order)
        return order.skip(zero).map(batch, num_parallel_calls=data.workers, deterministic=True)

    rows = None if count is None else (count - 1) * _count_rows(first_batch) + _count_rows(last_batch)
    return BatchedSource(epoch, first_batch, rows, steps)


def from_generator(data: Any, steps: int | None = None) -> BatchedSource:
    """Wraps a Python generator or a data loader of batches of any size, which one thread reads in order.

    `steps` batches count as an epoch; by default all batches.

    Raises:
      InputError: Keras does not accept the data, or its length is unknown and `steps` is None.
    """
    try:
        is_generator = isinstance(data, types.GeneratorType)
        adapter = keras_internals.adapt_data((with_tuples(strip_none(b)) for b in data) if is_generator else data)
    except ValueError as error:
        raise InputError(str(error).splitlines()[0]) from error
    if adapter.length is None and steps is None:
        raise InputError(_UNKNOWN_LENGTH.format(f"a {type(data).__name__}"))
    batches, first = map_to_elements(adapter.batches), as_element(adapter.first)
    rows = None if adapter.length is None or steps is not None else _count_by_reading(batches)
    return BatchedSource(lambda *_: batches, first, rows, steps, adapter.is_reiterable)


def _begin_epoch(data: keras.utils.PyDataset, epoch: int) -> np.int64:
    """Calls the hooks of all epochs up to `epoch`, including epochs that a resumed run skips; once for a repeated epoch."""
    last_epoch = _last_epochs.get(data, -1)
    for _ in range(max(epoch - last_epoch, 1)):
        if data in _last_epochs:
            data.on_epoch_end()
        data.on_epoch_begin()
        _last_epochs[data] = epoch
    return np.int64(0)


def _as_arrays(batch: Any) -> Element:
    element = as_element(with_tuples(batch))
    check_element(element)
    return tf.nest.map_structure(np.asarray, element)


def _count_rows(batch: Any) -> int:
    return len(tf.nest.flatten(batch)[0])


def _count_by_reading(dataset: tf.data.Dataset) -> int:
    _log.info("Reading data of unknown size once, to count its examples. To avoid this, set steps_per_epoch.")
    rows = dataset.map(lambda *batch: tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0])
    return int(rows.reduce(tf.constant(0, tf.int64), lambda total, count: total + count))


_NUMBERS_AND_TEXT = (int, float, complex, str, bytes)


def as_dataset_splits(value: Any, name: str, steps: int | None = None, test_steps: int | None = None) -> DatasetSplits:
    """Converts data returned by a user's function to a `DatasetSplits`.

    Args:
      value: arrays (x, y) or (x, y, sample_weight); other data that `as_examples` accepts; a pair of these, for training
        and test; or a `DatasetSplits`. Structures of arrays must be dicts, because two lists or tuples are taken as a pair.
      name: name of the dataset.
      steps: number of batches of the training data that count as an epoch; by default all batches.
      test_steps: same as `steps`, for the test data.

    Raises:
      InputError: the value is not of a supported form.
    """
    if isinstance(value, DatasetSplits):
        return value
    train, test = value if _is_pair(value) else (value, None)
    return _create_splits(name, train, test, steps, test_steps)


def _create_splits(
    name: str, train: Any, test: Any, steps: int | None = None, test_steps: int | None = None
) -> DatasetSplits:
    examples = as_examples(train, steps)
    x, y = examples.element_spec[:2]
    shape = tuple(x.shape) if isinstance(x, tf.TensorSpec) else ()
    is_label = isinstance(y, tf.TensorSpec) and y.dtype.is_integer and y.shape in ((), (1,))  # (1,) for a pandas Series
    # Classes are counted only if the labels are in memory.
    classes = int(np.max(train[1])) + 1 if is_label and isinstance(train, tuple | list) else None
    return DatasetSplits(name, examples, None if test is None else as_examples(test, test_steps), shape, classes)


def fit_data(
    x: Any,
    y: Any,
    sample_weight: Any,
    validation_data: Any,
    validation_split: float,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
) -> DatasetSplits:
    """Converts the data arguments of Keras's `fit` to a `DatasetSplits`; `x` may also be the complete data, see `all_data`.

    Raises:
      InputError: two arguments are mutually exclusive, or the data is not of a supported form.
    """
    value = all_data(x, y, sample_weight)
    if validation_split and validation_data is not None:
        raise InputError(
            "`validation_data` and `validation_split` are mutually exclusive. Received: both, with "
            f"validation_split={validation_split}."
        )
    if validation_split:
        return _create_splits("data", *_split(value, validation_split, y is not None))
    splits = (
        as_dataset_splits(value, "data", steps_per_epoch, validation_steps)
        if y is None
        else _create_splits("data", value, None)
    )
    if validation_data is None:
        return splits
    with evaluation_errors():
        return dataclasses.replace(splits, test=as_examples(validation_data, validation_steps))


@contextlib.contextmanager
def evaluation_errors() -> Iterator[None]:
    """Prefixes the message of an `InputError` with `Evaluation data:`."""
    try:
        yield
    except InputError as error:
        raise InputError(f"Evaluation data: {error}") from error


def all_data(x: Any, y: Any, sample_weight: Any) -> Any:
    """Returns x if it is the complete data, otherwise the tuple of x, targets and sample weights.

    As in Keras, if `y` is None, a list of arrays contains the inputs of a model whose layers add the loss, and a tuple is
    (x, y). Raises `InputError` if sample weights are passed without targets.
    """
    _check_weights(y, sample_weight)
    if y is None:
        are_inputs = isinstance(x, list) and has_arrays(x) and all(array is not None for array in x) and not _is_pair(x)
        return (x,) if are_inputs or isinstance(x, np.ndarray | tf.Tensor | dict) else x
    return (x, y) if sample_weight is None else (x, y, sample_weight)


def test_examples(value: Any) -> Any:
    """Returns the test examples of a `DatasetSplits`; other data unchanged."""
    if not isinstance(value, DatasetSplits):
        return value
    if value.test is None:
        raise InputError(
            f"An evaluation or prediction uses the test examples of a `DatasetSplits`. Received: {value.name}, which has no "
            "test examples. Pass its `train` or other data."
        )
    return value.test


def _split(value: Any, fraction: float, has_targets: bool) -> tuple[Any, ...]:
    are_parts = isinstance(value, tuple | list) and len(value) in (1, 2, 3) and not _is_pair(value)
    if not has_targets and not (are_parts and has_arrays(value)):
        raise InputError(
            f"`validation_split` requires arrays. Received: a {type(value).__name__}. Pass `validation_data` instead."
        )
    arrays = _element_parts(value)
    rows = _count_rows(arrays)
    begin = int(rows * (1.0 - fraction))
    if not 0 < begin < rows:
        raise InputError(
            f"`validation_split` must leave rows for training and validation. Received: {fraction} of {rows} rows."
        )
    parts = (slice(begin), slice(begin, None))
    return tuple(tf.nest.map_structure(lambda array, part=part: array[part], arrays) for part in parts)


def as_examples(value: Any, steps: int | None = None) -> Examples:
    """Converts data in any form that Keras's `fit` accepts to `Examples`.

    Args:
      value: arrays (x, y) or (x, y, sample_weight), each an array or a list, tuple or dict of arrays; or x alone, for a
        model whose layers add the loss; a `tf.data.Dataset` of batches or of single examples; a
        `keras.utils.PyDataset`, a Python generator or a data loader, of batches; or `Examples`.
      steps: number of batches that count as an epoch; by default all of the data.

    Raises:
      InputError: the value is not of a supported form, or is infinite and `steps` is None.
    """
    if isinstance(value, Examples):
        return value
    if isinstance(value, tf.data.Dataset):
        value = map_to_elements(value)
        check_element(value.element_spec)
        return from_dataset(value, steps) if keras_internals.is_batched(value) else StreamSource(value)
    if isinstance(value, tuple | list) and len(value) in (1, 2, 3):
        parts = tuple(with_tuples(part) for part in _element_parts(value))
        return ArraySource(parts if len(parts) > 1 else without_targets(*parts))
    if isinstance(value, np.ndarray | tf.Tensor | dict):
        return ArraySource(without_targets(with_tuples(value)))
    if isinstance(value, keras.utils.PyDataset):
        return from_py_dataset(value, steps)
    if isinstance(value, Iterator) or is_data_loader(value):
        return from_generator(value, steps)
    raise InputError(
        "A dataset must be arrays (x, y), a tf.data.Dataset, a keras.utils.PyDataset, a generator of batches, a Source, "
        f"a pair of these for training and test, or a DatasetSplits. Received: {type(value).__name__}."
    )


def _element_parts(value: Any) -> tuple[Any, ...]:
    """Returns (x,), (x, y) or (x, y, sample_weight); raises `InputError` for weights without y, and for other types."""
    x, y, weights = (*value, None, None)[:3]
    _check_weights(y, weights)
    parts = (x,) if y is None else (x, y) if weights is None else (x, y, weights)
    for name, part in zip(("x", "y", "sample_weight"), parts, strict=False):
        check_array(name, part)
    return parts


def _check_weights(y: Any, weights: Any) -> None:
    if y is None and weights is not None:
        raise InputError(
            "`sample_weight` needs arrays `x` and `y`. Received: `sample_weight` without `y`. Pass all three."
        )


def check_array(name: str, value: Any) -> None:
    """Raises `InputError` for text, functions, and lists of scalars, each of which Keras would treat as an array."""
    is_list = isinstance(value, list) and bool(value)
    if is_list and all(isinstance(leaf, _NUMBERS_AND_TEXT) for leaf in tf.nest.flatten(value)):
        received = f"a list of {type(value[0]).__name__}. Pass numpy.array({name})"
    elif isinstance(value, str | bytes) or callable(value):
        received = f"{type(value).__name__}. Pass an array of rows, or a list or dict of arrays for several inputs"
    else:
        return
    raise InputError(f"`{name}` must be an array. Received: {received}.")


def is_data_loader(value: Any) -> bool:
    """Returns whether a value is a PyTorch `DataLoader`."""
    return type(value).__module__.startswith("torch.utils.data")


def _is_pair(value: Any) -> bool:
    """Returns whether a value is a pair of datasets, for training and test, rather than (x, y)."""
    return isinstance(value, tuple | list) and len(value) == 2 and all(_is_dataset(part) for part in value)


def _is_dataset(part: Any) -> bool:
    return isinstance(part, Examples | tf.data.Dataset | keras.utils.PyDataset) or (
        isinstance(part, tuple | list) and len(part) in (2, 3) and all(not np.isscalar(item) for item in part)
    )


def input_examples(x: Any, steps: int | None, batch_size: int) -> Examples:
    """Converts the data of a prediction to examples; targets are ignored.

    Args:
      x: an array, or a list, tuple or dict of arrays for a model with several inputs; a `tf.data.Dataset` of batches or of
        single examples: x, (x,), (x, y) or (x, y, sample_weight); a `keras.utils.PyDataset` of such batches; a generator
        of batches (x,) or (x, y); `Examples`; or a `DatasetSplits`, whose test examples are used.
      steps: number of batches; required for infinite data.
      batch_size: number of examples in a batch, for unbatched data.

    Raises:
      InputError: the data is not of a supported form, or is infinite and `steps` is None.
    """
    x = test_examples(x)
    if isinstance(x, tf.data.Dataset):
        if steps is None and x.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise InputError("Infinite data needs `steps`. Received: a tf.data.Dataset that repeats.")
        x = map_to_elements(x)
        if len(x.element_spec) > 3:
            x = x.map(without_targets)
        if steps is None:
            return as_examples(x)
        return as_examples(x.take(steps if keras_internals.is_batched(x) else steps * batch_size))
    if isinstance(x, Examples | keras.utils.PyDataset | Iterator) or is_data_loader(x):
        is_finite = isinstance(x, keras.utils.PyDataset) and x.num_batches is not None
        return as_examples(x, None if is_finite else steps)
    return as_examples((x,))


class PaddedSource(Source):
    """A source whose last example is repeated until the number of examples is divisible by `divisor`."""

    def __init__(self, source: Source, divisor: int):
        self._source, self._last = source, source.size - 1
        self.size = -(-source.size // divisor) * divisor

    def fetch(self, indices: tf.Tensor) -> Element:
        return self._source._fetch(tf.minimum(indices, self._last))
