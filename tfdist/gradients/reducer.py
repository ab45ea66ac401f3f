"""The contract `Reducer`: from each replica's tensors to their sums on every replica."""

import abc
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.distribution.strategy import State


class Reduced(NamedTuple):
    """What a reducer made of the tensors of all replicas.

    Attributes:
      totals: the sums over replicas, exactly or nearly, in the order, shapes and dtypes of the tensors; bitwise equal on
        every replica.
      sent: this replica's summand of `totals`: its own tensors where the sum is exact, what is left of them where it is
        lossy. Over the replicas it adds up to `totals`, to rounding.
      state: the new state, in the order of `Reducer.state`, to be kept if the step counts.
      witnesses: tensors, bitwise equal on every replica, all finite if and only if the tensors of every replica were.
    """

    totals: list[tf.Tensor]
    sent: list[tf.Tensor]
    state: list[tf.Tensor]
    witnesses: list[tf.Tensor]


class Reducer(abc.ABC):
    """A value that sums lists of tensors over replicas, exactly or nearly, and may keep state between its calls.

    It does not know what the tensors are. Its state is passed in and returned, so that whoever calls it decides whether a
    step counts.

    Attributes:
      biased: whether `sent` is not what the tensors are on average, so that what is left out must be sent later.
      keeps_shapes: whether it needs each tensor in its own shape; else buckets may hand it vectors of several.
      packs: whether it packs its messages by itself, so that it should get all tensors in one call: buckets would only add
        messages.
      remembers: whether it keeps what it does not send, so that error feedback would count that twice.
      experimental: whether it has not been shown both to learn and to win time on some link.
    """

    biased: bool = False
    keeps_shapes: bool = False
    packs: bool = False
    remembers: bool = False
    experimental: bool = False

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """The state that it keeps for tensors of these names, shapes and dtypes; by default none."""
        return []

    @abc.abstractmethod
    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> Reduced:
        """Sums over replicas.

        Args:
          tensors: dense, of static shapes, in the same order on every replica.
          state: current values, in the order of `state()`.
          collectives: those of the replica.
          name: names the messages; the same on every replica, another one for each call of a step.
        """


class Sum(Reducer):
    """The engine's own all-reduce, one message for the whole list. Exact to rounding; cost 2 n (N - 1) / N bytes."""

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> Reduced:
        """See base class. A sum shows an inf or a NaN of any summand, so it is its own witness."""
        totals = collectives.all_reduce(tensors, name=name)
        return Reduced(totals, list(tensors), [], totals)


def specs_of(tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
    """Shapes and dtypes of tensors, under names that say their place alone."""
    return [tf.TensorSpec(tensor.shape, tensor.dtype, f"tensor{i}") for i, tensor in enumerate(tensors)]


def split_at(values: Sequence[tf.Tensor], count: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """The first `count` values of a state, and the others."""
    return list(values[:count]), list(values[count:])
