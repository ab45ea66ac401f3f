"""The contract `Collectives`, with the operations that can be composed of others written once.

In the costs below n is the number of bytes in the tensors that a replica hands over and N the number of replicas.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Literal

import tensorflow as tf

Op = Literal["sum", "mean", "max"]


@dataclasses.dataclass(frozen=True)
class Wire:
    """The dtypes that an engine carries; whoever packs bytes bitcasts them to one of these.

    Attributes:
      reduces: dtypes that can be summed on the way.
      gathers: dtypes that can be gathered, exchanged and broadcast.
      packed: the dtype to which packed bytes are bitcast before they are gathered.
      exchanges: whether the engine has an all-to-all of its own, which costs less than the gather that stands in for it.
    """

    reduces: frozenset[tf.DType]
    gathers: frozenset[tf.DType]
    packed: tf.DType
    exchanges: bool = False


class Collectives(abc.ABC):
    """The operations between the replicas of one group, usable eagerly and inside `tf.function`.

    Every operation takes a list of tensors and returns a list, so that an engine can send them as one message. All
    replicas of the group make the same calls with the same names, dtypes and, where an operation combines
    elementwise, shapes. A name is used for one call of a step only: engines that match messages by name rely on it.
    Results are reproducible from run to run for the same inputs and number of replicas.

    Attributes:
      size: the number of replicas in the group, a Python int.
      wire: the dtypes that the engine carries.
    """

    size: int
    wire: Wire

    @property
    @abc.abstractmethod
    def rank(self) -> tf.Tensor | int:
        """This replica's number in the group; a scalar int32 tensor where one trace serves several replicas."""

    @abc.abstractmethod
    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """Combines each tensor elementwise over the replicas.

        Args:
          tensors: tensors of any shapes, equal on every replica, of dtypes in `wire.reduces`.
          op: "sum", "mean" or "max".
          name: names the call, the same on every replica.

        Returns:
          Tensors of the same shapes and dtypes, bitwise equal on every replica. Cost: 2 n (N - 1) / N sent.
        """

    @abc.abstractmethod
    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """Concatenates each tensor of all replicas along its first dim, in the order of ranks.

        First dims may differ between replicas and may be 0. Cost: n (N - 1) sent.

        Args:
          tensors: tensors of rank 1 or more, of dtypes in `wire.gathers`, equal on every replica in the other dims.
          name: names the call, the same on every replica.
        """

    def reduce_scatter(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """Combines each tensor over the replicas and returns this replica's share of its first dim.

        The first dim is divisible by `size`; replica r gets rows [r d / N, (r + 1) d / N). Cost here, composed of an
        all-reduce: 2 n (N - 1) / N sent, twice that of an engine's own.
        """
        return [self._share(tensor) for tensor in self.all_reduce(tensors, op, name=name)]

    def all_to_all(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """Sends the r-th of N equal parts of each tensor's first dim to replica r; returns what the others sent.

        The result's parts are in the order of the ranks they came from. Cost here, composed of an all-gather:
        n (N - 1) sent, N times that of an engine's own.
        """
        gathered = self.all_gather(tensors, name=name)
        return [self._parts_for_me(whole) for whole in gathered]

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        """Returns the root's tensors, of any shapes, equal on every replica, to every replica.

        Cost here, composed of an all-gather: n (N - 1) sent.
        """
        gathered = self.all_gather([tf.expand_dims(tensor, 0) for tensor in tensors], name=name)
        return [whole[root] for whole in gathered]

    def barrier(self, *, name: str) -> tf.Operation | tf.Tensor:
        """Returns something that is complete only when every replica has made the call."""
        return self.all_reduce([tf.zeros([1], tf.float32)], name=name)[0]

    def _share(self, tensor: tf.Tensor) -> tf.Tensor:
        rows = tf.shape(tensor)[0] // self.size
        return tensor[self.rank * rows : (self.rank + 1) * rows]

    def _parts_for_me(self, whole: tf.Tensor) -> tf.Tensor:
        by_sender = tf.reshape(whole, tf.concat([[self.size, self.size, -1], tf.shape(whole)[1:]], 0))
        return tf.reshape(by_sender[:, self.rank], tf.concat([[-1], tf.shape(whole)[1:]], 0))
