"""The result and the reduction of a step: stateful sums over replicas, norms, and conditional updates."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.gradients import Reducer, ReductionResult
from tfdist.step.layer_state import assign
from tfdist.step.state_store import StateStore


class ComputeResult(NamedTuple):
    """The result of `Step.compute` on each replica."""

    gradients: list[tf.Tensor]  # gradients after reduction and clipping, equal on every replica
    state: list[tf.Tensor]  # the reducer's new state, to be stored if the step is applied
    scale: list[tf.Tensor]  # new state of the loss scale, even if the step is not applied; empty without it
    # Values before the step of the variables that the forward pass assigns, to be restored if the step is not applied
    previous_values: list[tf.Tensor]
    loss: tf.Tensor  # scalar; loss of the global batch, equal on every replica
    finite: tf.Tensor  # scalar bool; whether the loss and every gradient are finite, the same on every replica
    norm: tf.Tensor  # scalar; global gradient norm before clipping, if requested or needed, else 0
    # Scalar float64; time at which the batch was available, in seconds since the epoch; 0 if there is no clock
    arrival_time: tf.Tensor
    # Scalar float64; seconds that this replica spent computing gradients; 0 if there is no clock
    compute_seconds: tf.Tensor


class Reduction:
    """A reducer and the `variables` of its state. The methods are called in replica functions."""

    def __init__(self, reducer: Reducer, specs: Sequence[tf.TensorSpec], store: StateStore, prefix: str = ""):
        """Creates the state; `prefix` makes its names different from those of other reductions."""
        states = [dataclasses.replace(state, name=prefix + state.name) for state in reducer.state(specs)]
        self._reducer, self.variables = reducer, store.variables(states)

    def reduce(self, tensors: Sequence[tf.Tensor], collectives: Collectives, *, name: str) -> ReductionResult:
        """Sums tensors over replicas; does not assign the reducer's new state."""
        return self._reducer.reduce(tensors, self.state(), collectives, name=name)

    def state(self) -> list[tf.Tensor]:
        """Returns the current state."""
        return [tf.convert_to_tensor(variable) for variable in self.variables]

    def assign(self, state: Sequence[tf.Tensor]) -> None:
        """Assigns a new state."""
        assign(self.variables, state)


def square_norms(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the sum of the squares of each tensor, in floatx."""
    return [tf.cast(tf.reduce_sum(tf.square(tensor)), keras.config.floatx()) for tensor in tensors]


def global_norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the L2 norm of the concatenated tensors, 0 if there are none; dtypes may differ."""
    return tf.sqrt(tf.add_n(square_norms(tensors))) if tensors else tf.zeros([], keras.config.floatx())


def run_if(
    condition: tf.Tensor,
    then: Callable[[], Any],
    otherwise: Callable[[], Any] = tuple,
    gradients: Sequence[tf.Tensor] = (),
) -> tf.Tensor:
    """Runs one of two functions for its side effects, for example to apply or to skip a step.

    Returns:
      [gradients] bool: whether each gradient is finite; all True if the condition holds.
    """

    def apply() -> tf.Tensor:
        then()
        return tf.ones([len(gradients)], tf.bool)

    def skip() -> tf.Tensor:
        otherwise()
        # Not tf.stack, which returns floats for an empty list: a pipeline stage may have no trainable variables.
        return tf.convert_to_tensor([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients], tf.bool)

    return tf.cond(condition, apply, skip)
