"""The `Collectives` interface, with default implementations of operations that are composed of others.

In the costs below, n is the number of bytes that a replica passes in, and N the number of replicas.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import tensorflow as tf

from tfdist.errors import InputError

Op = Literal["sum", "mean", "max"]
COMBINE: dict[Op, Callable[..., tf.Tensor]] = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "max": tf.reduce_max}


@dataclasses.dataclass(frozen=True)
class SupportedDtypes:
    """The dtypes that an engine supports; packed bytes are bitcast to one of them.

    Attributes:
      reducible: dtypes that can be summed.
      gatherable: dtypes that can be gathered, exchanged and broadcast; int32 is one of them on every engine.
      packed: dtype to which packed bytes are bitcast before they are gathered.
      send_only: dtypes that can be sent in messages between two ranks, but not gathered.
      native_all_to_all: whether the engine has a native all-to-all, which costs less than the default all-gather.
    """

    reducible: frozenset[tf.DType]
    gatherable: frozenset[tf.DType]
    packed: tf.DType
    native_all_to_all: bool = False
    send_only: frozenset[tf.DType] = frozenset()

    @property
    def sendable(self) -> frozenset[tf.DType]:
        """Dtypes of messages between two ranks."""
        return self.gatherable | self.send_only


class Collectives(abc.ABC):
    """Collective operations between the replicas of one group, usable eagerly and inside `tf.function`.

    Every operation takes and returns a list of tensors, which an engine can send as one message. All replicas of the group
    make the same calls with the same names, dtypes and, for elementwise operations, shapes. A name must be used for only one
    call of a step, because some engines match messages by name. Results are reproducible from run to run for the same inputs
    and number of replicas. In a loop, the calls of an iteration must follow those of the previous iteration, as with
    `parallel_iterations=1`.

    `tfdist.collectives.all_reduce` and `all_gather`, functions of these collectives and a tensor, are differentiable on every
    engine and in every group. Operations whose gradient would be wrong for several replicas raise `LookupError` when
    differentiated.

    `group` returns the collectives of some of the replicas, with new ranks. Groups may communicate at the same time, and
    replicas outside of a group make no call. Two ranks exchange messages with `send` and `receive`.

    Attributes:
      size: the number of replicas in the group, a Python int.
      dtypes: the dtypes that the engine supports.
    """

    size: int
    dtypes: SupportedDtypes

    @property
    @abc.abstractmethod
    def rank(self) -> tf.Tensor | int:
        """This replica's index in the group; a scalar int32 tensor if several replicas share one trace."""

    @property
    def static_rank(self) -> int:
        """`rank` as a Python int, for programs that differ between ranks, for example with groups.

        Raises:
          InputError: several replicas share one trace.
        """
        rank = tf.get_static_value(self.rank)
        if rank is None:
            raise InputError(
                "Groups and messages need a trace for each replica. Received: a trace that all replicas share. Use the "
                "strategy mirrored, multiworker or horovod."
            )
        return int(rank)

    def group(self, ranks: Sequence[int]) -> "Collectives":
        """Returns the collectives of some of the replicas. The calling replica must be one of them.

        Does not communicate, and may be called in every step. On engines with several processes, all groups, and all pairs
        that exchange messages, must be declared when the strategy is created (`groups=`).

        Args:
          ranks: ranks in this group, in ascending order; they become the ranks 0, 1, ...

        Raises:
          InputError: the ranks are invalid, the group was not declared, or the engine does not support groups.
        """
        if self.check_ranks(ranks) == tuple(range(self.size)):
            return self
        raise self._unsupported_error(f"a group of {list(ranks)}")

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        """Sends tensors to another rank of this group, which must call `receive` with this tag.

        The call is executed even if its result is not used. In a graph it does not block: it is executed when the tensors
        are available, so two ranks may both send first. In eager mode, it may block until the message is received. In a loop,
        both ranks must exchange the message in the same iteration.

        Args:
          tensors: tensors of static shapes, of dtypes in `dtypes.sendable`.
          to: rank of the receiver.
          tag: name of the message, unique in a step for each pair of sender and receiver.

        Returns:
          A scalar int32 that is available when the tensors have been sent, for control dependencies. Cost: n sent.

        Raises:
          InputError: the rank is invalid, a shape is unknown, or the engine does not support messages.
        """
        self.check_message(tensors, to, tag)
        raise self._unsupported_error(f"a message to rank {to}")

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        """Returns the tensors that another rank of this group passed to `send` with this tag.

        The call is executed even if its results are not used, so the sender never waits for it. It is not differentiable:
        send gradients back with `send`.

        Args:
          specs: static shapes and dtypes of the sender's tensors.
          source: rank of the sender.
          tag: the sender's tag.

        Raises:
          InputError: the rank is invalid, a shape is unknown, or the engine does not support messages.
        """
        self.check_message(specs, source, tag)
        raise self._unsupported_error(f"a message from rank {source}")

    def check_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Returns the ranks of a new group; raises `InputError` unless they are ascending and include the caller."""
        new_ranks = tuple(int(rank) for rank in ranks)
        if list(new_ranks) != sorted({*new_ranks} & {*range(self.size)}):
            raise InputError(
                f"A group must consist of different ranks from 0 to {self.size - 1}, in ascending order. Received: "
                f"{list(new_ranks)}. Correct the ranks."
            )
        if self.static_rank not in new_ranks:
            raise InputError(
                f"A replica must belong to the group whose collectives it uses. Received: {list(new_ranks)} on rank "
                f"{self.static_rank}. Call group only on its ranks."
            )
        return new_ranks

    def check_message(self, tensors: Sequence[tf.Tensor | tf.TensorSpec], peer: int, tag: str) -> None:
        """Raises `InputError` if the arguments of `send` or `receive` are invalid."""
        if peer == self.static_rank or not 0 <= peer < self.size:
            raise InputError(
                f"Messages are exchanged with another rank of the group. Received: rank {peer} on rank "
                f"{self.static_rank} of {self.size}. Correct the rank."
            )
        for tensor in tensors:
            if not tf.TensorShape(tensor.shape).is_fully_defined():
                raise InputError(
                    f"Messages must have static shapes. Received: {tensor.shape} in {tag}. Use tf.ensure_shape."
                )

    def _unsupported_error(self, received: str) -> InputError:
        return InputError(
            f"Only the strategies mirrored, multiworker and horovod have groups and messages. Received: {received}. Use one of "
            "them."
        )

    @abc.abstractmethod
    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """Combines each tensor elementwise over the replicas.

        Args:
          tensors: tensors of any shapes, equal on every replica, of dtypes in `dtypes.reducible`.
          op: "sum", "mean" or "max".
          name: name of the call, the same on every replica.

        Returns:
          Tensors of the same shapes and dtypes, bitwise equal on every replica. Cost: 2 n (N - 1) / N sent.
        """

    @abc.abstractmethod
    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """Concatenates each tensor of all replicas along its first dim, in the order of ranks.

        First dims may differ between replicas and may be 0. Cost: n (N - 1) sent.

        Args:
          tensors: tensors of rank 1 or more, of dtypes in `dtypes.gatherable`; their other dims are equal on every replica.
          name: name of the call, the same on every replica.
        """

    def stack(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """Stacks each tensor of all replicas along a new first dim, [N, ...]; shapes are equal on every replica.

        Cost: the same as `all_gather`.
        """
        return self.all_gather([tf.expand_dims(tensor, 0) for tensor in tensors], name=name)

    def reduce_scatter(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """Combines each tensor over the replicas and returns this replica's part of its first dim.

        The first dim must be divisible by `size`; replica r gets rows [r d / N, (r + 1) d / N). Cost of the default
        implementation, an all-reduce: 2 n (N - 1) / N sent, twice as much as in a native implementation.
        """
        totals = [(x, tf.shape(x)[0] // self.size) for x in self.all_reduce(tensors, op, name=name)]
        return [total[self.rank * rows : (self.rank + 1) * rows] for total, rows in totals]

    def all_to_all(
        self, tensors: Sequence[tf.Tensor], *, name: str, splits: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """Sends the r-th part of each tensor's first dim to replica r; returns the parts sent to this replica.

        Cost of the default implementation, an all-gather: n (N - 1) sent, and with splits 4 N (N - 1) bytes more. A native
        implementation sends each part only to its receiver: at most n.

        Args:
          tensors: tensors of rank 1 or more, of dtypes in `dtypes.gatherable`; their other dims are equal on every replica.
          name: name of the call, the same on every replica.
          splits: number of rows of each tensor for replica 0, 1, ...: int32, [N], each at least 0, with a sum equal to
            the first dim of every tensor. They may differ between replicas. None means N equal parts, of the same size on
            every replica. Either all replicas pass None or none does.

        Returns:
          Tensors of the same dtypes and other dims; the parts are in the order of the ranks that sent them. With
          splits, the first dim is the number of rows received, which may be 0 and is unknown during tracing.

        Raises:
          InputError: splits have a different dtype or shape.
          tf.errors.InvalidArgumentError: on this replica, at run time: splits are negative or have another sum.
        """
        if splits is None:
            return [self._parts_for_rank(all_rows) for all_rows in self.all_gather(tensors, name=name)]
        table, *all_tensors = self.all_gather([self._validate_splits(splits, tensors, name)[None], *tensors], name=name)
        ends = tf.reshape(tf.cumsum(tf.reshape(table, [-1])), [self.size, self.size])  # by sender and receiver
        ranges = [tf.unstack(offsets[:, self.rank], self.size) for offsets in (ends - table, ends)]
        return [tf.concat([all_rows[i:j] for i, j in zip(*ranges, strict=True)], 0) for all_rows in all_tensors]

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        """Returns the root's tensors on every replica; shapes must be equal on every replica.

        Cost of the default implementation, an all-gather: n (N - 1) sent.
        """
        return [stack[root] for stack in self.stack(tensors, name=name)]

    def all_rows_of(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the rows of all replicas in a group of one replica, which are `rows` itself."""
        return rows

    def barrier(self, *, name: str) -> tf.Operation | tf.Tensor:
        """Returns an operation or tensor that completes only when every replica has made the call."""
        return self.all_reduce([tf.zeros([1], tf.float32)], name=name)[0]

    def _parts_for_rank(self, tensor: tf.Tensor) -> tf.Tensor:
        by_sender = tf.reshape(tensor, tf.concat([[self.size, self.size, -1], tf.shape(tensor)[1:]], 0))
        return tf.reshape(by_sender[:, self.rank], tf.concat([[-1], tf.shape(tensor)[1:]], 0))

    def _validate_splits(self, splits: tf.Tensor, tensors: Sequence[tf.Tensor], name: str) -> tf.Tensor:
        """Validates the splits of an all-to-all, int32 [N], because invalid splits would mix up the rows of receivers."""
        splits = tf.convert_to_tensor(splits)
        if splits.dtype != tf.int32 or not splits.shape.is_compatible_with([self.size]):
            raise InputError(
                f"all_to_all {name}: splits must be int32, one for each of {self.size} replicas. Received: {splits.dtype.name} "
                f"of shape {splits.shape}. Pass tf.cast(rows, tf.int32), [{self.size}]."
            )
        splits = tf.ensure_shape(splits, [self.size])
        rows, total = [tf.shape(tensor)[0] for tensor in tensors], tf.reduce_sum(splits)
        are_valid = tf.reduce_all([tf.reduce_all(splits >= 0), *(tf.equal(total, count) for count in rows)])
        rule = (
            f"all_to_all {name}: splits must be at least 0, and their sum must be the number of rows of every "
            "tensor. Received:"
        )
        with tf.control_dependencies([tf.debugging.Assert(are_valid, [rule, splits, "for rows", *rows], self.size)]):
            return tf.identity(splits)


def call_by_dtype(
    call: Callable[[list[tf.Tensor]], Sequence[tf.Tensor]], tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Calls a function with the tensors of each dtype; returns the results in the order of all tensors."""
    results: dict[int, tf.Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        indices = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        results |= zip(indices, call([tensors[i] for i in indices]), strict=True)
    return [results[i] for i in range(len(tensors))]


def tensor_bytes(tensor: tf.TensorSpec | tf.Tensor | tf.IndexedSlices) -> int:
    """Returns the size in bytes of a tensor or spec with a static shape."""
    return int(tensor.shape.num_elements() * tensor.dtype.size)


# Dtypes to which others are cast without loss, on every engine.
CARRIERS = dict.fromkeys((tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32) | {
    tf.uint32: tf.int64,
    tf.bfloat16: tf.float32,
}


def to_transferable(tensor: tf.Tensor, collectives: Collectives) -> tf.Tensor:
    """Casts a tensor to a dtype that the engine can gather and broadcast; casting back is exact."""
    if tensor.dtype in collectives.dtypes.gatherable:
        return tensor
    return tf.cast(tensor, CARRIERS.get(tensor.dtype, tensor.dtype))


def assign_from_first(variables: Sequence[Any], collectives: Collectives) -> None:
    """Assigns the first replica's values to variables, on every replica."""
    tensors = [tf.convert_to_tensor(variable) for variable in variables]
    values = collectives.broadcast([to_transferable(tensor, collectives) for tensor in tensors], name="from_first")
    for variable, value, tensor in zip(variables, values, tensors, strict=True):
        variable.assign(tf.cast(value, tensor.dtype))
