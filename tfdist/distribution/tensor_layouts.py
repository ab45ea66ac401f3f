"""Layouts of the tensors inside a replica function, for strategies whose replica may be more than one device."""

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.sharding.dim_names import Dims


class TensorLayouts:
    """Layouts of tensors inside a replica function; here those of one device, which has every tensor as a whole.

    Attributes:
      row_shards: number of shards into which the rows of a replica are split.
      devices_per_replica: number of devices over which a replica is spread.
      shards_tensors: whether what a model computes may be sharded, so that it is only called where steps are compiled.
      holds_variables: whether a step can read all variables of the model where it runs.
    """

    row_shards: int = 1
    devices_per_replica: int = 1
    shards_tensors: bool = False
    holds_variables: bool = True

    def constrain(self, x: tf.Tensor, dims: Dims, name: str) -> tf.Tensor:
        """Returns a tensor of a model in the layout of its dims; `name` is for messages. See `tfdist.constrain`."""
        return x

    def by_rows(self, tensors: Any) -> Any:
        """Lays out model outputs for losses and metrics, or the rows of a micro-step."""
        return tensors

    def computing(self, variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager:
        """Context in which variables are as a forward pass without gradients needs them."""
        return contextlib.nullcontext()

    def stored(self, variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
        """Returns a value of a variable in the layout in which the variable is stored, to be assigned to it."""
        return value

    def computed_from(self, variable: keras.Variable, held: tf.Tensor, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the value that a layer computes with, differentiable with respect to the stored one.

        Args:
          variable: variable of the layer.
          held: its value as it is stored between layers.
          inputs: inputs of the layer; the result is not needed before they are available.
        """
        return held
