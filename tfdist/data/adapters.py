"""Wraps a user's own arrays or data sets in a `DataSet`."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.data.data_set import DataSet
from tfdist.data.examples import Examples, check_element, inputs_alone, with_elements
from tfdist.data.rebatched import from_dataset, from_generator, from_py_dataset
from tfdist.data.source import ArraySource
from tfdist.data.stream import StreamSource
from tfdist.data.structures import has_arrays, with_tuples
from tfdist.errors import InputError

_NUMBERS_AND_TEXT = (int, float, complex, str, bytes)


def as_data_set(value: Any, name: str, steps: int | None = None, test_steps: int | None = None) -> DataSet:
    """Wraps data returned by a user's function.

    Args:
      value: arrays (x, y) or (x, y, sample_weight), where structures of arrays are dicts, as two lists or tuples would be a
        pair; other data that `as_examples` accepts; a pair of these, for training and test; or a `DataSet`.
      name: name of the data set.
      steps: batches of the training data that are counted as an epoch; by default all.
      test_steps: the same for the test data.

    Raises:
      InputError: the value is something else.
    """
    if isinstance(value, DataSet):
        return value
    train, test = value if _is_pair(value) else (value, None)
    return _data_set(name, train, test, steps, test_steps)


def _data_set(name: str, train: Any, test: Any, steps: int | None = None, test_steps: int | None = None) -> DataSet:
    examples = as_examples(train, steps)
    x, y = examples.element_spec[:2]
    shape = tuple(x.shape) if isinstance(x, tf.TensorSpec) else ()
    return DataSet(name, examples, None if test is None else as_examples(test, test_steps), shape, _classes(train, y))


def fit_data(
    x: Any,
    y: Any,
    sample_weight: Any,
    validation_data: Any,
    validation_split: float,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
) -> DataSet:
    """Wraps the data arguments of Keras's `fit`, in which `x` may also be all data; see `all_data`.

    Raises:
      InputError: the arguments exclude each other, or the data has another form.
    """
    value = all_data(x, y, sample_weight)
    if validation_split and validation_data is not None:
        raise InputError(
            f"Give `validation_data` or `validation_split`, not both. Received: validation_split={validation_split}."
        )
    if validation_split:
        _check_split(value, validation_split, y is not None)
        return _data_set("data", *_split(value, validation_split))
    found = (
        as_data_set(value, "data", steps_per_epoch, validation_steps) if y is None else _data_set("data", value, None)
    )
    if validation_data is None:
        return found
    with about_evaluation():
        return dataclasses.replace(found, test=as_examples(validation_data, validation_steps))


@contextlib.contextmanager
def about_evaluation() -> Iterator[None]:
    """Context in which an `InputError` says that it is about the data to evaluate, not that for training."""
    try:
        yield
    except InputError as error:
        raise InputError(f"Evaluation data: {error}") from error


def all_data(x: Any, y: Any, sample_weight: Any) -> Any:
    """Returns x if it is all data, otherwise the tuple of it with targets and weights.

    As in Keras, a list of arrays without `y` is the inputs of a model, whose layers add the loss, and a tuple is (x, y). With
    `y`, nothing is guessed: lists of inputs and of outputs are not a pair of data sets.

    Raises:
      InputError: there are weights without targets.
    """
    _check_weights(y, sample_weight)
    if y is None:
        are_inputs = isinstance(x, list) and has_arrays(x) and all(each is not None for each in x) and not _is_pair(x)
        return (x,) if are_inputs or isinstance(x, np.ndarray | tf.Tensor | dict) else x
    return (x, y) if sample_weight is None else (x, y, sample_weight)


def of_test(value: Any) -> Any:
    """Returns the test examples of a `DataSet`; other data unchanged."""
    if not isinstance(value, DataSet):
        return value
    if value.test is None:
        raise InputError(
            f"An evaluation or prediction uses the test examples of a `DataSet`. Received: {value.name}, which has none. "
            "Give its `train` or other data."
        )
    return value.test


def _check_split(value: Any, fraction: float, has_targets: bool) -> None:
    are_parts = isinstance(value, tuple | list) and len(value) in (1, 2, 3) and not _is_pair(value)
    is_arrays = has_targets or (are_parts and has_arrays(value))
    if not is_arrays or not 0 < fraction < 1:
        raise InputError(
            "`validation_split` is a fraction in [0, 1) of arrays. Received: "
            f"{fraction} of {'arrays' if is_arrays else type(value).__name__}. Give `validation_data`."
        )


def _split(arrays: Any, fraction: float) -> tuple[Any, Any]:
    """Splits the last rows off arrays, as Keras does."""
    arrays = _given(arrays)
    rows = len(tf.nest.flatten(arrays)[0])
    begin = int(rows * (1.0 - fraction))
    if not 0 < begin < rows:
        raise InputError(f"`validation_split` must leave rows for both parts. Received: {fraction} of {rows} rows.")
    return _rows(arrays, slice(begin)), _rows(arrays, slice(begin, None))


def _rows(arrays: Any, part: slice) -> Any:
    return tf.nest.map_structure(lambda array: array[part], arrays)


def as_examples(value: Any, steps: int | None = None) -> Examples:
    """Wraps data in one of the forms of Keras's `fit`.

    Args:
      value: arrays (x, y) or (x, y, sample_weight), each an array or a list, tuple or dict of arrays; or x alone, for a
        model whose layers add the loss; a `tf.data.Dataset` of batches or of single examples; a
        `keras.utils.PyDataset`, a Python generator or a data loader, of batches; or `Examples`.
      steps: batches of a global batch each that are counted as an epoch; by default all of the data.

    Raises:
      InputError: the value is something else, or has no end, and `steps` is None.
    """
    if isinstance(value, Examples):
        return value
    if isinstance(value, tf.data.Dataset):
        value = with_elements(value)
        check_element(value.element_spec)
        return from_dataset(value, steps) if keras_internals.is_batched(value) else StreamSource(value)
    if isinstance(value, tuple | list) and len(value) in (1, 2, 3):
        parts = tuple(with_tuples(part) for part in _given(value))
        return ArraySource(parts if len(parts) > 1 else inputs_alone(*parts))
    if isinstance(value, np.ndarray | tf.Tensor | dict):
        return ArraySource(inputs_alone(with_tuples(value)))
    if isinstance(value, keras.utils.PyDataset):
        return from_py_dataset(value, steps)
    if isinstance(value, Iterator) or is_data_loader(value):
        return from_generator(value, steps)
    raise InputError(
        "A data set must be arrays (x, y), a tf.data.Dataset, a keras.utils.PyDataset, a generator of batches, a Source, "
        f"a pair of those for training and test, or a DataSet. Received: {type(value).__name__}."
    )


def _given(value: Any) -> tuple[Any, ...]:
    """Returns (x,), (x, y) or (x, y, sample_weight), without what is None.

    Raises:
      InputError: there are weights without targets, or a part is no array.
    """
    x, y, weights = (*value, None, None)[:3]
    _check_weights(y, weights)
    parts = (x,) if y is None else (x, y) if weights is None else (x, y, weights)
    for name, part in zip(("x", "y", "sample_weight"), parts, strict=False):
        check_array(name, part)
    return parts


def _check_weights(y: Any, weights: Any) -> None:
    if y is None and weights is not None:
        raise InputError(
            "`sample_weight` needs arrays `x` and `y`. Received: `sample_weight` without `y`. Give (x, y, weights)."
        )


def check_array(name: str, value: Any) -> None:
    """Raises `InputError` for a list of numbers or text, which is one array for each of them."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(leaf, _NUMBERS_AND_TEXT) for leaf in tf.nest.flatten(value))
    ):
        raise InputError(
            f"`{name}` must be an array. Received: a list of {type(value[0]).__name__}. Write numpy.array({name})."
        )


def is_data_loader(value: Any) -> bool:
    """Returns whether a value is a PyTorch `DataLoader`."""
    return type(value).__module__.startswith("torch.utils.data")


def _is_pair(value: Any) -> bool:
    """Returns whether a value is a pair of data sets, for training and test, rather than the x and the y of one."""
    return isinstance(value, tuple | list) and len(value) == 2 and all(_is_whole(part) for part in value)


def _is_whole(part: Any) -> bool:
    """Returns whether a part of a pair is a data set, rather than the x or the y of one."""
    return isinstance(part, Examples | tf.data.Dataset | keras.utils.PyDataset) or (
        isinstance(part, tuple | list) and len(part) in (2, 3) and all(not np.isscalar(item) for item in part)
    )


def _classes(value: Any, spec: Any) -> int | None:
    """Returns one more than the largest label if the labels are in memory, else None."""
    is_label = isinstance(spec, tf.TensorSpec) and spec.dtype.is_integer and spec.shape in ((), (1,))  # a pandas Series
    return int(np.max(value[1])) + 1 if is_label and isinstance(value, tuple | list) else None
