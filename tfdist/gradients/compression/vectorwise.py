"""Base classes of reducers that reduce each tensor separately, as a float32 vector."""

import abc
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.distribution.strategy import State
from tfdist.gradients.compression.all_gather_reducer import like, seed_of
from tfdist.gradients.reducer import Reduced, Reducer, split_at


def mark(x: tf.Tensor) -> tf.Tensor:
    """Returns a scalar float32 for a witness: 0 if x is finite, else NaN, so that sums of marks never overflow."""
    return tf.where(tf.reduce_all(tf.math.is_finite(x)), 0.0, float("nan"))


class ReducedVector(NamedTuple):
    """The result of reducing one vector; see `Reduced`.

    Attributes:
      total: [n] float32.
      sent: [n] float32.
      state: the new state, in the order of `vector_state`.
      witness: see `Reduced.witnesses`.
    """

    total: tf.Tensor
    sent: tf.Tensor
    state: list[tf.Tensor]
    witness: tf.Tensor


class Vectorwise(Reducer):
    """Reduces each tensor of a list with its own messages; an empty tensor sends nothing and keeps its state."""

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """See base class."""
        return [state for spec in specs for state in self.vector_state(spec)]

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> Reduced:
        """See base class."""
        whole = Reduced([], [], [], [])
        left, count = list(state), len(state) // max(1, len(tensors))
        for i, tensor in enumerate(tensors):
            mine, left = split_at(left, count)
            part = Reduced([tensor], [tensor], mine, [])
            if tensor.shape.num_elements():
                x = tf.reshape(tf.cast(tensor, tf.float32), [-1])
                total, sent, new_state, witness = self.reduce_vector(x, mine, collectives, name=f"{name}/{i}")
                part = Reduced([like(total, tensor)], [like(sent, tensor)], new_state, [witness])
            for values, more in zip(whole, part, strict=True):
                values += more
        return whole

    def vector_state(self, spec: tf.TensorSpec) -> list[State]:
        """Returns the state for one tensor; the number of states must not depend on the tensor. By default none."""
        return []

    @abc.abstractmethod
    def reduce_vector(
        self, x: tf.Tensor, state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> ReducedVector:
        """Sums a vector over replicas.

        Args:
          x: [n] float32, n static and at least 1.
          state: current values, in the order of `vector_state`.
          collectives: collectives of the replica.
          name: names the messages.
        """


class Stochastic(Vectorwise):
    """Base class of randomized reducers whose draws are equal on all replicas; the state is the number of draws."""

    def vector_state(self, spec: tf.TensorSpec) -> list[State]:
        """See base class."""
        return [State(f"{spec.name}/draws", (), tf.int32, per_replica=False)]

    def reduce_vector(
        self, x: tf.Tensor, state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> ReducedVector:
        """See base class."""
        [draws] = state
        total, sent, witness = self.reduce_drawn(x, seed_of(name, draws, 0), collectives, name=name)
        return ReducedVector(total, sent, [draws + 1], witness)

    @abc.abstractmethod
    def reduce_drawn(
        self, x: tf.Tensor, seed: tf.Tensor, collectives: Collectives, *, name: str
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Sums a vector over replicas; returns `total`, `sent` and `witness` of a `ReducedVector`.

        Args:
          x: [n] float32, n static and at least 1.
          seed: [2] int32, the same on all replicas.
          collectives: collectives of the replica.
          name: names the messages.
        """
