"""The contract `Reducer`: sums each replica's tensors over all replicas."""

import abc
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.distribution.strategy import State


class Reduced(NamedTuple):
    """The result of a reduction.

    Attributes:
      totals: exact or approximate sums over replicas, in the order, shapes and dtypes of the tensors; bitwise equal on
        every replica.
      sent: this replica's contribution to `totals`: its own tensors if the sum is exact, the part of them that was sent
        if it is lossy. Adds up to `totals` over the replicas, up to rounding.
      state: the new state, in the order of `Reducer.state`, to be stored if the step is applied.
      witnesses: tensors, bitwise equal on every replica, that are all finite if and only if the tensors of every
        replica are.
    """

    totals: list[tf.Tensor]
    sent: list[tf.Tensor]
    state: list[tf.Tensor]
    witnesses: list[tf.Tensor]

    def all_finite(self, *others: tf.Tensor) -> tf.Tensor:
        """Returns whether the tensors of all replicas, and others, are finite: a scalar bool."""
        # A sum is inf or NaN if any element is, in one pass over each tensor.
        return tf.reduce_all(tf.stack([tf.math.is_finite(tf.reduce_sum(x)) for x in (*self.witnesses, *others)]))


class Reducer(abc.ABC):
    """Sums lists of tensors over replicas, exactly or approximately; may have state.

    A reducer does not know what the tensors are. Its state is passed in and returned, so that the caller decides
    whether a step is applied.

    Attributes:
      biased: whether the expected value of `sent` differs from the tensors, so that the rest must be sent later.
      keeps_shapes: whether it needs each tensor in its own shape; otherwise buckets may pass vectors of several
        tensors.
      packs: whether it packs its own messages and should get all tensors in one call: buckets would only add messages.
      remembers: whether it stores what it does not send, so that error feedback would count it twice.
      experimental: whether it has yet to be shown both to train well and to save time on some link.
    """

    biased: bool = False
    keeps_shapes: bool = False
    packs: bool = False
    remembers: bool = False
    experimental: bool = False

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """Returns the state needed for tensors of these names, shapes and dtypes; by default none."""
        return []

    @abc.abstractmethod
    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> Reduced:
        """Sums tensors over replicas.

        Args:
          tensors: dense tensors of static shapes, in the same order on every replica.
          state: current values, in the order of `state()`.
          collectives: collectives of the replica.
          name: names the messages; the same on every replica, and unique within a step.
        """


class Sum(Reducer):
    """All-reduces the whole list as one message. Exact up to rounding; cost 2 n (N - 1) / N bytes."""

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> Reduced:
        """See base class. An inf or NaN of any replica is visible in the sum, which is therefore its own witness."""
        totals = collectives.all_reduce(tensors, name=name)
        return Reduced(totals, list(tensors), [], totals)


def specs_of(tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
    """Returns the shapes and dtypes of tensors; names contain only their index."""
    return [tf.TensorSpec(tensor.shape, tensor.dtype, f"tensor{i}") for i, tensor in enumerate(tensors)]


def split_at(values: Sequence[tf.Tensor], count: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the first `count` values of a state, and the rest."""
    return list(values[:count]), list(values[count:])
