"""Batches of `tf.data` pipelines and of what Keras adapts to them."""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing

# Names of TensorFlow's classes, which it does not export.
_BATCHES = ("_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset", "_RebatchDataset")
_SINGLES = ("_UnbatchDataset", "_TensorSliceDataset", "_RangeDataset")
_SAME_ELEMENTS = ("_MapDataset", "_ParallelMapDataset", "_PrefetchDataset", "_OptionsDataset", "CacheDataset")
_ANY_ELEMENTS = ("_FlatMapDataset", "_InterleaveDataset", "_ParallelInterleaveDataset", "_GroupByWindowDataset")


class Adapted(NamedTuple):
    """Data that Keras's `fit` takes, as a data set of batches.

    Attributes:
      batches: one epoch of batches.
      first: the first batch, as arrays.
      length: number of batches in an epoch; None if there is no end.
      can_be_read_again: whether each iterator reads from the beginning.
    """

    batches: tf.data.Dataset
    first: Any
    length: int | None
    can_be_read_again: bool


def array_of(data: Any) -> np.ndarray:
    """Returns data of examples as Keras's `fit` converts it: floating-point numbers in floatx, a pandas Series as a column."""
    is_of_keras = isinstance(data, tf.Tensor) or type(data).__module__.partition(".")[0] == "pandas"
    data = data if is_of_keras else np.asarray(data)
    try:
        found = array_slicing.convert_to_sliceable(data)
    except (ValueError, TypeError):  # text and objects
        return np.asarray(data)
    return np.asarray(found.convert_to_numpy(found.array))


def is_batched(dataset: tf.data.Dataset) -> bool:
    """Returns whether the elements of a data set are batches, by how it was made; else by their shapes."""
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    if any(shape.rank == 0 for shape in shapes):
        return False
    made = dataset
    while made._inputs() and type(made).__name__ not in (*_BATCHES, *_SINGLES, *_ANY_ELEMENTS):
        made = made._inputs()[0]
    if type(made).__name__ in (*_BATCHES, *_SINGLES):
        return type(made).__name__ in _BATCHES
    return all(shape.rank is None or shape[0] is None for shape in shapes)


def count_rows(dataset: tf.data.Dataset, of_first: int) -> int | None:
    """Returns the number of rows of a finite data set of batches, without reading it; None if that is not possible.

    Args:
      dataset: batches.
      of_first: rows of the first batch. If a function that was mapped over batches has changed their number, it may have
        changed that of any batch.
    """
    batches = int(dataset.cardinality())
    if batches < 0:
        return None
    static = next(spec.shape[0] if spec.shape.rank else None for spec in tf.nest.flatten(dataset.element_spec))
    if static is not None:
        return batches * int(static)
    made = dataset
    while type(made).__name__ in _SAME_ELEMENTS:
        [made] = made._inputs()
    if type(made).__name__ not in ("_BatchDataset", "_ParallelBatchDataset"):
        return None
    [examples] = made._inputs()
    rows, size = int(examples.cardinality()), int(made._batch_size)
    if made._drop_remainder:
        rows -= rows % size
    return rows if rows >= 0 and min(size, rows) == of_first else None


def cache_files(data: Any) -> list[str]:
    """Returns the files in which a data set of `tf.data`, or those that it is made of, cache elements."""
    if not isinstance(data, tf.data.Dataset):
        return []
    name = data._filename.numpy().decode() if type(data).__name__ == "CacheDataset" else ""
    return [*([name] if name else []), *(file for made in data._inputs() for file in cache_files(made))]


def adapted(data: Any) -> Adapted:
    """Returns batches of a Python generator or a data loader, as Keras's `fit` reads them.

    Raises:
      ValueError: Keras does not accept the data.
    """
    adapter = data_adapters.get_data_adapter(data)
    batches = adapter.get_tf_dataset()
    is_generator = isinstance(adapter, data_adapters.GeneratorDataAdapter)
    first = adapter._first_batches[0] if is_generator else next(iter(batches.take(1)))
    return Adapted(batches, tf.nest.map_structure(np.asarray, first), adapter.num_batches, not is_generator)
