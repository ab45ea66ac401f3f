"""Static shapes of the tensors that cross between stages, for a number of rows."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.errors import InputError
from tfdist.pipelining import cut


class CrossingSpec(NamedTuple):
    """A tensor that crosses from a stage to the next, for a micro-batch.

    Attributes:
      spec: its static shape and dtype.
      has_gradient: whether its gradient is sent back.
    """

    spec: tf.TensorSpec
    has_gradient: bool


def crossings_of(found: Sequence[cut.Crossing], rows: int) -> list[CrossingSpec]:
    """Returns what crosses between two stages for a number of rows.

    Raises:
      InputError: another size is unknown.
    """
    what = "Tensors between the stages of a pipeline"
    return [CrossingSpec(spec_of(each, rows, what), each.has_gradient) for each in found]


def with_static_shapes(tensors: Sequence[tf.Tensor], crossings: Sequence[CrossingSpec]) -> list[tf.Tensor]:
    """Returns tensors with the static shapes of what crosses, which some operations, such as those on text, do not keep."""
    pairs = zip(tensors, crossings, strict=True)
    return [x if x.shape.is_fully_defined() else tf.ensure_shape(x, crossing.spec.shape) for x, crossing in pairs]


def spec_of(tensor: cut.Crossing | cut.Tensor, rows: int, what: str) -> tf.TensorSpec:
    """Returns the static shape and the dtype of a tensor for a number of rows.

    Args:
      tensor: its first size is None if it is that of rows.
      rows: number of rows.
      what: what the tensor is one of, for the error.

    Raises:
      InputError: another size is unknown.
    """
    shape = [rows, *tensor.shape[1:]] if tensor.shape[:1] == (None,) else [*tensor.shape]
    if None in shape:
        raise InputError(
            f"{what} need static shapes. Received: {tensor.name} of shape {tensor.shape}. Give keras.Input its sizes."
        )
    return tf.TensorSpec(shape, tensor.dtype)
