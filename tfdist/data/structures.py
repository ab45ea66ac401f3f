"""Structures of arrays in the form that tf.data takes."""

from typing import Any


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
