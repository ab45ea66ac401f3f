"""Collectives for groups of replicas on different devices of one process, which communicate through TensorFlow's queues.

Queue operations are asynchronous and stateful: they are never pruned, folded, merged or blocking, and work in loops and
conditions. Unlike in tf.distribute's collectives, no other replica takes part in a message.
"""

import itertools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.collectives.interface import COMBINE, Collectives, Op, SupportedDtypes
from tfdist.collectives.replica_context import prevent_gradient

_unique = itertools.count()


class Queues:
    """The queues of one strategy, by sender, receiver, kind of message and dtypes."""

    def __init__(self) -> None:
        self._name = f"tfdist/{next(_unique)}"
        self._ends: dict[tuple[int, int, str, tuple[tf.DType, ...]], tuple[tf.Tensor, tf.Tensor]] = {}

    def put(self, tensors: Sequence[tf.Tensor], sender: int, receiver: int, name: str) -> tf.Operation | None:
        """Adds a message to its queue."""
        dtypes = tuple(tensor.dtype for tensor in tensors)
        with tf.device("CPU:0"):
            end, _ = self._queue_ends(sender, receiver, name, dtypes)
            return tf.raw_ops.QueueEnqueueV2(handle=end, components=list(tensors))

    def get(self, dtypes: Sequence[tf.DType], sender: int, receiver: int, name: str) -> list[tf.Tensor]:
        """Returns the next message of a queue."""
        with tf.device("CPU:0"):
            _, end = self._queue_ends(sender, receiver, name, tuple(dtypes))
            if tf.executing_eagerly() and tf.raw_ops.QueueSizeV2(handle=end) == 0:
                raise RuntimeError(
                    f"In eager mode, all replicas of a process must make the same calls at the same time. Received: {name} on "
                    f"rank {receiver}, but not yet on rank {sender}. Call it in a tf.function."
                )
            return tf.raw_ops.QueueDequeueV2(handle=end, component_types=list(dtypes))

    def _queue_ends(
        self, sender: int, receiver: int, name: str, dtypes: tuple[tf.DType, ...]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns separate handles for the two ends of a queue, since TensorFlow orders operations that share a handle.

        With one handle, a message that is received earlier in the trace than it is sent would never arrive.
        """
        key = sender, receiver, name, dtypes
        if key not in self._ends:
            queue = {"component_types": list(dtypes), "shared_name": f"{self._name}/{len(self._ends)}"}
            with tf.init_scope(), tf.device("CPU:0"):
                self._ends[key] = tf.raw_ops.FIFOQueueV2(**queue), tf.raw_ops.FIFOQueueV2(**queue)
        return self._ends[key]


class DeviceGroup(Collectives):
    """The collectives of some replicas of one process. Each replica sends its tensors to all others and combines them.

    In a `tf.function`, only the replicas of the group make a call, even in a loop or a condition. In eager mode, replicas run
    one after another up to a synchronization point, so all replicas of the process must make the same number of calls, each
    in its own group. A failed step may leave messages in the queues; create the strategy again after it.
    """

    rank: int = 0

    def __init__(self, ranks: Sequence[int], rank: int, dtypes: SupportedDtypes, queues: Queues):
        """Initializes the collectives of the replica with index `rank` in `ranks`."""
        self.size, self.rank, self.dtypes = len(ranks), rank, dtypes
        self._ranks, self._queues = tuple(ranks), queues

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class. Cost: n (N - 1) sent, within the process."""
        return self._combine(tensors, f"all_reduce/{name}", lambda parts: COMBINE[op](tf.stack(parts), axis=0))

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        return self._combine(tensors, f"all_gather/{name}", lambda parts: tf.concat(parts, axis=0), rows_differ=True)

    def group(self, ranks: Sequence[int]) -> "DeviceGroup":
        members = self.check_ranks(ranks)
        return DeviceGroup([self._ranks[rank] for rank in members], members.index(self.rank), self.dtypes, self._queues)

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        message = [tf.convert_to_tensor(tensor) for tensor in tensors]
        self.check_message(message, to, tag)
        enqueue = self._queues.put(message, self._ranks[self.rank], self._ranks[to], f"message/{tag}")
        self._synchronize()
        with tf.control_dependencies([] if enqueue is None else [enqueue]):
            return tf.identity(0)

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        self.check_message(specs, source, tag)
        self._synchronize()
        dtypes = [spec.dtype for spec in specs]
        tensors = self._queues.get(dtypes, self._ranks[source], self._ranks[self.rank], f"message/{tag}")
        return [_copy(tensor, spec.shape) for tensor, spec in zip(tensors, specs, strict=True)]

    def _combine(
        self,
        tensors: Sequence[tf.Tensor],
        name: str,
        combine: Callable[[list[tf.Tensor]], tf.Tensor],
        rows_differ: bool = False,
    ) -> list[tf.Tensor]:
        """Combines each tensor over the ranks, in order; with `rows_differ`, first dims may differ between ranks."""
        inputs = prevent_gradient(tensors, name)
        if not inputs:
            return []
        name, local_rank = f"{name}/{self._ranks}", self._ranks[self.rank]
        other_ranks = [rank for rank in self._ranks if rank != local_rank]
        for rank in other_ranks:
            self._queues.put(inputs, local_rank, rank, name)
        self._synchronize()
        dtypes = [tensor.dtype for tensor in inputs]
        parts = {rank: self._queues.get(dtypes, rank, local_rank, name) for rank in other_ranks}
        results = []
        for i, tensor in enumerate(inputs):
            shape = tf.TensorShape([None]).concatenate(tensor.shape[1:]) if rows_differ else tensor.shape
            copies = {local_rank: tensor, **{rank: _copy(parts[rank][i], shape) for rank in other_ranks}}
            results.append(combine([copies[rank] for rank in self._ranks]))
        return results

    def _synchronize(self) -> None:
        """Lets the other replicas of this process run up to the same point; has an effect only in eager mode."""
        if tf.executing_eagerly():
            tf.distribute.get_replica_context().merge_call(lambda strategy: None)


def _copy(tensor: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
    return tf.ensure_shape(tf.identity(tensor), shape)
