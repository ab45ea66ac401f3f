"""`OptimizerShards`: which part of the optimizer's state each replica has. By default, each has the whole state."""

import contextlib
from collections.abc import Sequence
from typing import Protocol

import keras
import tensorflow as tf

from tfdist import keras_internals


class Updates(Protocol):
    """What the shards need to know of a strategy."""

    def apply(
        self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> None:
        """See `tfdist.Strategy.apply`."""


class OptimizerShards:
    """The default: each replica has the whole state of the optimizer, and updates all weights.

    Attributes:
      parts: number of parts of the state.
    """

    parts: int = 1

    def __init__(self, strategy: Updates):
        """Initializes the shards.

        Args:
          strategy: the strategy.
        """
        self._strategy = strategy

    def built_later(self, model: keras.Model) -> contextlib.AbstractContextManager:
        """Context in which a compiled model is built, but not its optimizer, if that is up to `build`."""
        return contextlib.nullcontext()

    def build(self, model: keras.Model) -> None:
        """Creates this process's part of the state of a built model's optimizer; call it outside of the scope."""

    def apply(
        self, optimizer: keras.Optimizer, gradients: Sequence[tf.Tensor], variables: Sequence[keras.Variable]
    ) -> None:
        """Updates weights with reduced gradients; in a replica function. `exchange` must follow.

        An update without variables, as in a stage of a pipeline that has none to train, counts as one, too: the steps of the
        optimizer are those of the run in every process.
        """
        if variables:
            self._strategy.apply(optimizer, gradients, variables)
        else:
            optimizer.iterations.assign_add(1)

    def exchange(self, variables: Sequence[keras.Variable]) -> None:
        """Gives all replicas the weights that only some have updated; in a replica function."""

    def state_bytes(self, optimizer: keras.Optimizer) -> list[int]:
        """Returns the bytes of the optimizer's variables in each part."""
        return [sum(keras_internals.bytes_of(variable) for variable in optimizer.variables)]

    def is_here_only(self, variable: keras.Variable) -> bool:
        """Returns whether this replica alone has a variable of the optimizer."""
        return False

    def is_of_all(self, variable: keras.Variable) -> bool:
        """Returns whether every replica has a variable of the optimizer."""
        return True

    def from_owners(
        self, variables: Sequence[keras.Variable], values: Sequence[tf.Tensor], name: str
    ) -> list[tf.Tensor]:
        """Returns for each trained variable the value that the replica with its state has; in a replica function.

        Args:
          variables: trained variables.
          values: this replica's tensors, of their shapes and dtypes.
          name: names the calls.
        """
        return list(values)

    def complete(self, variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager:
        """Context in which the optimizer's variables among these all have values on the chief; every process enters it."""
        return contextlib.nullcontext()
