"""The contract `Collectives`; operations that can be composed of others are implemented here.

In the costs below n is the number of bytes in the tensors that a replica passes in and N the number of replicas.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Literal

import tensorflow as tf

from tfdist.errors import InputError

Op = Literal["sum", "mean", "max"]


@dataclasses.dataclass(frozen=True)
class Wire:
    """The dtypes that an engine supports; packed bytes are bitcast to one of them.

    Attributes:
      reduces: dtypes that can be summed.
      gathers: dtypes that can be gathered, exchanged and broadcast; int32 is one of them on every engine.
      packed: dtype to which packed bytes are bitcast before they are gathered.
      exchanges: whether the engine has a native all-to-all, which costs less than the all-gather that replaces it
        otherwise.
    """

    reduces: frozenset[tf.DType]
    gathers: frozenset[tf.DType]
    packed: tf.DType
    exchanges: bool = False


class Collectives(abc.ABC):
    """Collective operations between the replicas of one group, usable eagerly and inside `tf.function`.

    Every operation takes a list of tensors and returns a list, so that an engine can send them as one message. All
    replicas of the group make the same calls with the same names, dtypes and, where an operation combines elementwise,
    shapes. A name is used for only one call of a step, because some engines match messages by name. Results are
    reproducible from run to run for the same inputs and number of replicas.

    Attributes:
      size: the number of replicas in the group, a Python int.
      wire: the dtypes that the engine supports.
    """

    size: int
    wire: Wire

    @property
    @abc.abstractmethod
    def rank(self) -> tf.Tensor | int:
        """This replica's index in the group; a scalar int32 tensor where one trace is shared by several replicas."""

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
          tensors: tensors of rank 1 or more, of dtypes in `wire.gathers`; their other dims are equal on every replica.
          name: names the call, the same on every replica.
        """

    def reduce_scatter(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """Combines each tensor over the replicas and returns this replica's share of its first dim.

        The first dim must be divisible by `size`; replica r gets rows [r d / N, (r + 1) d / N). Cost here, composed of
        an all-reduce: 2 n (N - 1) / N sent, twice that of a native implementation.
        """
        return [self._share(tensor) for tensor in self.all_reduce(tensors, op, name=name)]

    def all_to_all(
        self, tensors: Sequence[tf.Tensor], *, name: str, splits: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """Sends the r-th part of each tensor's first dim to replica r; returns what all replicas have sent to this one.

        Cost here, composed of an all-gather: n (N - 1) sent, and with splits 4 N (N - 1) bytes more. A native
        implementation sends each part only to its receiver: n at most.

        Args:
          tensors: tensors of rank 1 or more, of dtypes in `wire.gathers`; their other dims are equal on every replica.
          name: names the call, the same on every replica.
          splits: number of rows of each tensor for replica 0, 1, ...: int32, [N], each at least 0, with a sum equal to
            the first dim of every tensor. They may differ between replicas. None: N equal parts, of the same size on
            every replica. Either all replicas pass None or none does.

        Returns:
          Tensors of the same dtypes and other dims; the parts are in the order of the ranks that sent them. With
          splits, the first dim is the number of rows received, which may be 0 and is unknown during tracing.

        Raises:
          InputError: splits have another dtype or shape.
          tf.errors.InvalidArgumentError: on this replica, at run time: splits are negative or have another sum.
        """
        if splits is None:
            return [self._parts_for_me(whole) for whole in self.all_gather(tensors, name=name)]
        table, *gathered = self.all_gather([self._fitting(splits, tensors, name)[None], *tensors], name=name)
        ends = tf.reshape(tf.cumsum(tf.reshape(table, [-1])), [self.size, self.size])  # by sender and receiver
        mine = [tf.unstack(each[:, self.rank], self.size) for each in (ends - table, ends)]
        return [tf.concat([whole[i:j] for i, j in zip(*mine, strict=True)], 0) for whole in gathered]

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        """Returns the root's tensors on every replica; shapes may be any, but are equal on every replica.

        Cost here, composed of an all-gather: n (N - 1) sent.
        """
        gathered = self.all_gather([tf.expand_dims(tensor, 0) for tensor in tensors], name=name)
        return [whole[root] for whole in gathered]

    def barrier(self, *, name: str) -> tf.Operation | tf.Tensor:
        """Returns an operation or tensor that completes only when every replica has made the call."""
        return self.all_reduce([tf.zeros([1], tf.float32)], name=name)[0]

    def _share(self, tensor: tf.Tensor) -> tf.Tensor:
        rows = tf.shape(tensor)[0] // self.size
        return tensor[self.rank * rows : (self.rank + 1) * rows]

    def _parts_for_me(self, whole: tf.Tensor) -> tf.Tensor:
        by_sender = tf.reshape(whole, tf.concat([[self.size, self.size, -1], tf.shape(whole)[1:]], 0))
        return tf.reshape(by_sender[:, self.rank], tf.concat([[-1], tf.shape(whole)[1:]], 0))

    def _fitting(self, splits: tf.Tensor, tensors: Sequence[tf.Tensor], name: str) -> tf.Tensor:
        """Returns validated splits of an all-to-all, int32 [N]; invalid ones would mix up the rows of receivers."""
        splits = tf.convert_to_tensor(splits)
        if splits.dtype != tf.int32 or not splits.shape.is_compatible_with([self.size]):
            raise InputError(
                f"all_to_all {name}: splits must be int32, one for each of {self.size} replicas. Received: {splits.dtype.name} "
                f"of shape {splits.shape}. Pass tf.cast(rows, tf.int32), [{self.size}]."
            )
        splits = tf.ensure_shape(splits, [self.size])
        rows, total = [tf.shape(tensor)[0] for tensor in tensors], tf.reduce_sum(splits)
        fits = tf.reduce_all([tf.reduce_all(splits >= 0), *(tf.equal(total, each) for each in rows)])
        rule = (
            f"all_to_all {name}: splits must be at least 0, and their sum must be the number of rows of every "
            "tensor. Received:"
        )
        with tf.control_dependencies([tf.debugging.Assert(fits, [rule, splits, "for rows", *rows], self.size)]):
            return tf.identity(splits)
