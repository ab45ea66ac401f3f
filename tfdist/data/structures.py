"""Structures of arrays in the form that tf.data takes."""

from typing import Any

import tensorflow as tf

ABSENT = tf.qint8  # marks what is None in an element of a data set: no data has this dtype


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
    """Returns a structure with None for what is absent: as Keras's adapters mark it, or as `without_none` does."""

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
