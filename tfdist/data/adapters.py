"""Wraps a user's own arrays or data sets in a `DataSet`."""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.data_set import DataSet
from tfdist.data.examples import Examples
from tfdist.data.source import ArraySource
from tfdist.data.stream import StreamSource
from tfdist.errors import InputError


def as_data_set(value: Any, name: str) -> DataSet:
    """Wraps data returned by a user's function.

    Args:
      value: arrays (x, y) or (x, y, sample_weight), where structures of arrays are dicts; a `tf.data.Dataset` of single
        examples; a `Source` or `StreamSource`; a pair of these, for training and test; or a `DataSet`.
      name: name of the data set.

    Raises:
      InputError: the value is something else.
    """
    if isinstance(value, DataSet):
        return value
    pair = isinstance(value, tuple | list) and len(value) == 2 and all(_is_whole(part) for part in value)
    train, test = (as_examples(value[0]), as_examples(value[1])) if pair else (as_examples(value), None)
    x, y = train.element_spec[:2]
    shape = tuple(x.shape) if isinstance(x, tf.TensorSpec) else ()
    return DataSet(name, train, test, shape, _classes(value[0] if pair else value, y))


def fit_data(x: Any, y: Any, sample_weight: Any, validation_data: Any, validation_split: float) -> DataSet:
    """Wraps the data arguments of Keras's `fit`, in which `x` may also be all data, as for `as_data_set`.

    Raises:
      InputError: the arguments exclude each other, or the data has another form.
    """
    if y is None and sample_weight is not None:
        raise InputError(
            "`sample_weight` belongs to arrays `x` and `y`. Received: it without `y`. Give (x, y, weights)."
        )
    value = x if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
    if validation_split and validation_data is not None:
        raise InputError(
            f"Give `validation_data` or `validation_split`, not both. Received: validation_split={validation_split}."
        )
    if validation_split:
        value = _split(value, validation_split)
    found = as_data_set(value, "data")
    return found if validation_data is None else dataclasses.replace(found, test=as_examples(validation_data))


def _split(value: Any, fraction: float) -> tuple[Any, Any]:
    """Splits the last rows off arrays, as Keras does."""
    arrays = isinstance(value, tuple | list) and len(value) in (2, 3) and not all(map(_is_whole, value))
    if not arrays or not 0 < fraction < 1:
        raise InputError(
            "`validation_split` is a fraction in [0, 1) of arrays. Received: "
            f"{fraction} of {'arrays' if arrays else type(value).__name__}. Give `validation_data`."
        )
    rows = len(tf.nest.flatten(value)[0])
    begin = int(rows * (1.0 - fraction))
    if not 0 < begin < rows:
        raise InputError(f"`validation_split` must leave rows for both parts. Received: {fraction} of {rows} rows.")
    first, last = (_rows(value, part) for part in (slice(begin), slice(begin, None)))
    return first, last


def _rows(arrays: Any, part: slice) -> Any:
    return tf.nest.map_structure(lambda array: array[part], tuple(arrays))


def as_examples(value: Any) -> Examples:
    """Wraps arrays or a `tf.data.Dataset`; see `as_data_set`."""
    if isinstance(value, Examples):
        return value
    if isinstance(value, tf.data.Dataset):
        return StreamSource(value)
    if isinstance(value, tuple | list) and len(value) in (2, 3):
        return ArraySource(tuple(value))
    raise InputError(
        "A data set must be arrays (x, y), a tf.data.Dataset of single examples, a Source, a pair of those for "
        f"training and test, or a DataSet. Received: {type(value).__name__}."
    )


def _is_whole(part: Any) -> bool:
    """Returns whether a part of a pair is a data set, rather than the x or the y of one."""
    return isinstance(part, Examples | tf.data.Dataset) or (
        isinstance(part, tuple | list) and len(part) in (2, 3) and all(not np.isscalar(item) for item in part)
    )


def _classes(value: Any, spec: Any) -> int | None:
    """Returns one more than the largest label if the labels are in memory, else None."""
    is_label = isinstance(spec, tf.TensorSpec) and spec.dtype.is_integer and spec.shape.rank == 0
    return int(np.max(value[1])) + 1 if is_label and isinstance(value, tuple | list) else None
