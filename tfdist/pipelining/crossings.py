"""Tensors between stages with their static shapes."""

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
