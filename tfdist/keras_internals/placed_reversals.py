"""Tensors of which an operation reverses dims, for strategies that lay them out."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import array_ops, gen_array_ops

_REVERSE = ((tf, "reverse"), (array_ops, "reverse"), (array_ops, "reverse_v2"))  # names of one function


@contextlib.contextmanager
def reversals_placed(place: Callable[[tf.Tensor, bool], tf.Tensor]) -> Iterator[None]:
    """Context in which a tensor of which dims are reversed, and the result, are replaced by `place` of it.

    `tf.reverse`, which `keras.ops.flip` calls, becomes a slice with negative strides.

    Args:
      place: also receives whether the first dim stays as it is.
    """
    strided_slice, originals = gen_array_ops.strided_slice, [getattr(module, name) for module, name in _REVERSE]

    def placed(input: Any, begin: Any, end: Any, strides: Any, **given: Any) -> tf.Tensor:  # called by keyword
        steps, tensor = tf.get_static_value(tf.convert_to_tensor(strides)), tf.convert_to_tensor(input)
        if steps is None or (steps > 0).all():
            return strided_slice(input, begin, end, strides, **given)
        keeps_rows = _keeps_rows(tensor.shape.rank, steps, **given)
        return place(strided_slice(place(tensor, keeps_rows), begin, end, strides, **given), keeps_rows)

    try:
        gen_array_ops.strided_slice = placed
        for module, name in _REVERSE:
            setattr(module, name, _reverse)
        yield
    finally:
        gen_array_ops.strided_slice = strided_slice
        for (module, name), original in zip(_REVERSE, originals, strict=True):
            setattr(module, name, original)


def _reverse(tensor: Any, axis: Any, name: str | None = None) -> tf.Tensor:
    tensor = tf.convert_to_tensor(tensor)
    reversed_dims = {dim % tensor.shape.rank for dim in tf.get_static_value(tf.convert_to_tensor(axis)).tolist()}
    dims = [slice(None, None, -1 if dim in reversed_dims else 1) for dim in range(tensor.shape.rank)]
    return tf.identity(tensor[tuple(dims)], name)


def _keeps_rows(
    rank: int | None, steps: Any, ellipsis_mask: int = 0, new_axis_mask: int = 0, shrink_axis_mask: int = 0, **_: Any
) -> bool:
    """Returns whether a slice leaves the first dim first, and does not reverse it; False if that is not known."""
    named = len(steps) - 1 - new_axis_mask.bit_count()
    is_empty = ellipsis_mask & 1 and (rank is None or rank <= named)
    return bool(steps[0] > 0) and not (new_axis_mask | shrink_axis_mask) & 1 and not is_empty
