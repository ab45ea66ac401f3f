"""Collectives on Horovod's operations, not on its Keras wrappers, which reduce nothing under Keras 3."""

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from tfdist.collectives.interface import Collectives, Op, Wire
from tfdist.collectives.no_constant_folding import not_constant

_OPS = {"sum": hvd.Sum, "mean": hvd.Average, "max": hvd.Max}


class HorovodCollectives(Collectives):
    """The collectives of an initialized Horovod.

    Horovod may fuse separately named messages in order of arrival, which changes the order of summation between runs.
    The strategy therefore sets HOROVOD_FUSION_THRESHOLD=0, and the caller packs tensors that should be sent together
    (`tfdist.gradients.bucket`).
    """

    _floats = frozenset([tf.float16, tf.float32, tf.float64])
    _integers = frozenset([tf.uint8, tf.int8, tf.int32, tf.int64])
    wire = Wire(
        reduces=_floats | {tf.int32, tf.int64},
        gathers=_floats | _integers | {tf.bool},
        packed=tf.uint8,
        exchanges=True,
    )

    def __init__(self, process_set: hvd.ProcessSet = hvd.global_process_set) -> None:
        """Reads rank and size from the initialized Horovod.

        Args:
          process_set: the group of ranks; includes this process.
        """
        self._process_set = process_set
        self.size = process_set.size()
        self._rank = process_set.rank()

    @property
    def rank(self) -> int:
        """See base class."""
        return self._rank

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""
        return self._each(lambda tensor, **call: hvd.allreduce(tensor, op=_OPS[op], **call), tensors, name)

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class."""
        return self._each(hvd.allgather, tensors, name, rows_change=True)

    def reduce_scatter(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class; an all-to-all and a local sum: n (N - 1) / N sent.

        Horovod's own reduce-scatter makes every later all-reduce of the process 25 to 35 times slower under Gloo.
        """
        combine = {"sum": tf.reduce_sum, "mean": tf.reduce_mean, "max": tf.reduce_max}[op]
        received = self.all_to_all(tensors, name=name)
        return [combine(self._by_sender(tensor), axis=0) for tensor in received]

    def all_to_all(
        self, tensors: Sequence[tf.Tensor], *, name: str, splits: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """See base class; n (N - 1) / N sent; with splits, n without this replica's own part."""
        if splits is None:
            return self._each(hvd.alltoall, tensors, name)
        hidden = not_constant(self._fitting(splits, tensors, name))

        def exchange(tensor: tf.Tensor, **call: Any) -> tf.Tensor:
            received, _ = hvd.alltoall(tensor, hidden, **call)
            return received

        return self._each(exchange, tensors, name, rows_change=True)

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        """See base class; n sent along a tree."""
        first = self._process_set.ranks[root]  # Horovod's root is a rank in the job
        return self._each(lambda tensor, **call: hvd.broadcast(tensor, first, **call), tensors, name)

    def barrier(self, *, name: str) -> tf.Tensor:
        """See base class; the assertion uses the sum, since TensorFlow prunes a Horovod op that is only waited for."""
        done = super().barrier(name=name)
        with tf.control_dependencies([tf.debugging.Assert(tf.equal(done, 0), [done])]):
            return tf.identity(done)

    def _by_sender(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tensor, tf.concat([[self.size, -1], tf.shape(tensor)[1:]], 0))

    def _each(
        self, call: Callable[..., tf.Tensor], tensors: Sequence[tf.Tensor], name: str, rows_change: bool = False
    ) -> list[tf.Tensor]:
        """Makes one call per tensor; with `rows_change`, the first dims of a tensor and its result may differ."""
        results = []
        for i, tensor in enumerate(tensors):
            tensor = tf.convert_to_tensor(tensor)
            result = call(not_constant(tensor), name=f"{name}/{i}", process_set=self._process_set)
            shape = tf.TensorShape([None]).concatenate(tensor.shape[1:]) if rows_change else tensor.shape
            results.append(tf.reshape(result, []) if tensor.shape.rank == 0 else tf.ensure_shape(result, shape))
        return results
