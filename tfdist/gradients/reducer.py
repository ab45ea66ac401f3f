"""The contract `Reducer`: from each replica's tensors to their sums on every replica."""

import abc
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.strategy import State


class Reducer(abc.ABC):
    """A value that sums lists of tensors over replicas, exactly or nearly, and may keep state between its calls.

    It does not know what the tensors are. Its state is passed in and returned, so that whoever calls it decides whether a
    step counts.
    """

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """The state that it keeps for tensors of these names, shapes and dtypes; by default none."""
        return []

    @abc.abstractmethod
    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Sums over replicas.

        Args:
          tensors: dense, of static shapes, in the same order on every replica.
          state: current values, in the order of `state()`.
          collectives: those of the replica.
          name: names the messages; the same on every replica, another one for each call of a step.

        Returns:
          The sums, in the order, shapes and dtypes of `tensors` and bitwise equal on every replica; and the new state.
        """


class Sum(Reducer):
    """The engine's own all-reduce, one message for the whole list. Exact to rounding; cost 2 n (N - 1) / N bytes."""

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """See base class."""
        return collectives.all_reduce(tensors, name=name), []
