"""Tensors between stages with their static shapes."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.errors import InputError
from tfdist.pipelining import cut


class Crossing(NamedTuple):
    """A tensor that crosses from a stage to the next, for a micro-batch.

    Attributes:
      spec: its static shape and dtype.
      has_gradient: whether its gradient is sent back.
    """

    spec: tf.TensorSpec
    has_gradient: bool


def crossings_of(found: Sequence[cut.Crossing], rows: int) -> list[Crossing]:
    """Returns what crosses between two stages for a number of rows.

    Raises:
      InputError: another size is unknown.
    """
    return [
        Crossing(tf.TensorSpec(_shape(crossing, rows), crossing.dtype), crossing.has_gradient) for crossing in found
    ]


def _shape(crossing: cut.Crossing, rows: int) -> list[int]:
    shape = [rows, *crossing.shape[1:]] if crossing.shape[:1] == (None,) else [*crossing.shape]
    if None in shape:
        raise InputError(
            f"Tensors between the stages of a pipeline need static shapes. Received: {crossing.name} of shape "
            f"{crossing.shape}. Give keras.Input its sizes."
        )
    return [size for size in shape if size is not None]
