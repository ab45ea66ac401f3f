"""The reduction of a step: sums over replicas by a reducer with state, and norms of the sums."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.gradients import Reduced, Reducer
from tfdist.step.side_effects import assign
from tfdist.step.state_store import StateStore


class Reduction:
    """A reducer with the variables of its state; the methods are called in replica functions."""

    def __init__(self, reducer: Reducer, specs: Sequence[tf.TensorSpec], store: StateStore, prefix: str = ""):
        """Creates the state.

        Args:
          reducer: sums tensors over replicas.
          specs: names, shapes and dtypes of the tensors.
          store: store of the state.
          prefix: of the names of the state, which keeps it apart from that of another reduction.
        """
        states = [dataclasses.replace(state, name=prefix + state.name) for state in reducer.state(specs)]
        self._reducer, self._state = reducer, store.variables(states)

    def reduce(self, tensors: Sequence[tf.Tensor], collectives: Collectives, *, name: str) -> Reduced:
        """Sums tensors over replicas; the reducer's new state is not assigned yet."""
        return self._reducer.reduce(tensors, self.state(), collectives, name=name)

    def state(self) -> list[tf.Tensor]:
        """Returns the current state."""
        return [tf.convert_to_tensor(variable) for variable in self._state]

    def assign(self, state: Sequence[tf.Tensor]) -> None:
        """Assigns a new state."""
        assign(self._state, state)


def square_norms(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the sum of the squares of each tensor, in floatx."""
    return [tf.cast(tf.reduce_sum(tf.square(tensor)), keras.config.floatx()) for tensor in tensors]


def global_norm(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the norm of all tensors as one vector, 0 if there are none; dtypes may differ."""
    return tf.sqrt(tf.add_n(square_norms(tensors))) if tensors else tf.zeros([], keras.config.floatx())


def run_if(condition: tf.Tensor, then: Callable[[], Any], otherwise: Callable[[], Any] = tuple) -> None:
    """Runs one of two functions for its side effects, such as to apply a step or to skip it."""

    def run(function: Callable[[], Any]) -> tf.Tensor:
        function()
        return tf.constant(True)

    tf.cond(condition, lambda: run(then), lambda: run(otherwise))
