"""Collectives built on Horovod's operations, because its Keras wrappers reduce nothing under Keras 3."""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from tfdist.collectives.differentiable import OneReplica
from tfdist.collectives.interface import COMBINE, Collectives, Op, SupportedDtypes, to_transferable
from tfdist.collectives.no_constant_folding import hide_constant, runtime_zero, wait_for_tensors
from tfdist.collectives.process_groups import NO_SETS, Ranks, declared_group
from tfdist.collectives.replica_context import prevent_gradient

_OPS = {"sum": hvd.Sum, "mean": hvd.Average, "max": hvd.Max}


class HorovodCollectives(Collectives):
    """The collectives of an initialized Horovod.

    Horovod may fuse separately named messages in order of arrival, which changes the order of summation between runs.
    The strategy therefore sets HOROVOD_FUSION_THRESHOLD=0, and the caller packs tensors that should be sent together
    (`tfdist.gradients.bucket`).
    """

    rank: int = 0
    _floats = frozenset([tf.float16, tf.float32, tf.float64])
    _integers = frozenset([tf.uint8, tf.int8, tf.int32, tf.int64])
    dtypes = SupportedDtypes(
        reducible=_floats | {tf.int32, tf.int64},
        gatherable=_floats | _integers | {tf.bool},
        packed=tf.uint8,
        native_all_to_all=True,
    )

    def __init__(
        self,
        process_set: hvd.ProcessSet = hvd.global_process_set,
        process_sets: Mapping[Ranks, hvd.ProcessSet] = NO_SETS,
    ) -> None:
        """Initializes the collectives of a process set; `process_sets` are the sets passed to Horovod's initialization."""
        self._process_set = process_set
        self._process_sets = process_sets
        self.size = process_set.size()
        self.rank = process_set.rank()
        self._calls: dict[object, Callable[..., Any]] = {}

    def group(self, ranks: Sequence[int]) -> Collectives:
        members = self.check_ranks(ranks)
        if len(members) == 1:
            return OneReplica()
        if members == tuple(range(self.size)):
            return self
        return HorovodCollectives(self._set_of(members), self._process_sets)

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        """See base class. Implemented as a broadcast in a set of two ranks.

        A rank that closes the strategy cancels messages that others have not received yet. Synchronize first, for example
        with `strategy.group.barrier`.
        """
        message_tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
        self.check_message(message_tensors, to, tag)

        def message(*parts: tf.Tensor) -> tf.Tensor:
            inputs = [hide_constant(tensor) for tensor in parts]
            return wait_for_tensors([self._message(x, (self.rank, to), f"{tag}/{i}") for i, x in enumerate(inputs)])

        return self._call_in_function(("send", to, tag), message, message_tensors)

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        """See base class. Implemented as a broadcast in a set of two ranks."""
        self.check_message(specs, source, tag)

        def message() -> list[tf.Tensor]:
            # TensorFlow would fold a broadcast of a constant, and merge two with the same input.
            placeholders = [tf.fill(spec.shape.as_list() or [1], tf.cast(runtime_zero(), spec.dtype)) for spec in specs]
            tensors = [self._message(x, (source, self.rank), f"{tag}/{i}") for i, x in enumerate(placeholders)]
            with tf.control_dependencies([wait_for_tensors(tensors)]):
                return [tf.reshape(x, spec.shape) for x, spec in zip(tensors, specs, strict=True)]

        return self._call_in_function(("receive", source, tag, tuple(specs)), message, [])

    def _message(self, tensor: tf.Tensor, ends: tuple[int, int], name: str) -> tf.Tensor:
        """Broadcasts a tensor from one rank to another, with a name that is the same in any scope: graphs may differ."""
        root, receiver = (self._process_set.ranks[rank] for rank in ends)
        label = re.sub("[^A-Za-z0-9]", "_", name)
        full_name = f"message_{root}_{receiver}_{zlib.crc32(name.encode()):08x}_{label}/"
        return hvd.broadcast(tensor, root, name=full_name, ignore_name_scope=True, process_set=self._set_of(ends))

    def _call_in_function(self, key: object, call: Callable[..., Any], tensors: Sequence[tf.Tensor]) -> Any:
        """Makes a call in a graph, because messages are matched by name and eager Horovod operations have no names."""
        if tf.inside_function():
            return call(*tensors)
        if key not in self._calls:
            self._calls[key] = tf.function(call, autograph=False)
        return self._calls[key](*tensors)

    def _set_of(self, ranks: Sequence[int]) -> hvd.ProcessSet:
        job_ranks = sorted(self._process_set.ranks[rank] for rank in ranks)
        if len(job_ranks) == hvd.size():
            return hvd.global_process_set
        return declared_group(self._process_sets, job_ranks)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class. Also accepts bfloat16, which is sent and summed in float32, and rounded once."""

        def reduce(tensor: tf.Tensor, **call: Any) -> tf.Tensor:
            return tf.cast(hvd.allreduce(to_transferable(tensor, self), op=_OPS[op], **call), tensor.dtype)

        # Horovod differentiates a maximum as if it were a sum.
        return self._map(reduce, prevent_gradient(tensors, "A maximum") if op == "max" else tensors, name)

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class. Not differentiable: Horovod's gradient would be the mean over replicas."""
        return self._map(hvd.allgather, prevent_gradient(tensors, "all_gather"), name, rows_change=True)

    def reduce_scatter(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class. Implemented as an all-to-all and a local sum; cost: n (N - 1) / N sent.

        Horovod's own reduce-scatter makes every later all-reduce of the process 25 to 35 times slower under Gloo. Accepts
        bfloat16 as `all_reduce` does.
        """
        inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
        parts = self.all_to_all([to_transferable(tensor, self) for tensor in inputs], name=name)
        by_sender = [tf.reshape(x, tf.concat([[self.size, -1], tf.shape(x)[1:]], 0)) for x in parts]
        return [tf.cast(COMBINE[op](x, axis=0), tensor.dtype) for x, tensor in zip(by_sender, inputs, strict=True)]

    def all_to_all(
        self, tensors: Sequence[tf.Tensor], *, name: str, splits: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """See base class. Cost: n (N - 1) / N sent; with splits, n minus the part that this replica keeps."""
        if splits is None:
            return self._map(hvd.alltoall, tensors, name)
        run_time_splits = hide_constant(self._validate_splits(splits, tensors, name))

        def exchange(tensor: tf.Tensor, **call: Any) -> tf.Tensor:
            rows, _ = hvd.alltoall(tensor, run_time_splits, **call)
            return rows

        return self._map(exchange, tensors, name, rows_change=True)

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        """See base class. Cost: n sent along a tree. Not differentiable, like `all_gather`."""
        job_root = self._process_set.ranks[root]  # Horovod's root is a rank in the job
        inputs = prevent_gradient(tensors, "broadcast")
        return self._map(lambda tensor, **call: hvd.broadcast(tensor, job_root, **call), inputs, name)

    def barrier(self, *, name: str) -> tf.Tensor:
        """See base class. TensorFlow would prune a Horovod operation with only control outputs."""
        return wait_for_tensors([super().barrier(name=name)])

    def _map(
        self, call: Callable[..., tf.Tensor], tensors: Sequence[tf.Tensor], name: str, rows_change: bool = False
    ) -> list[tf.Tensor]:
        """Makes one call per tensor; with `rows_change`, the first dims of a tensor and its result may differ."""
        # A rank may use the same name in several groups. TensorFlow would number the names, but only on that rank.
        group = "/" + "_".join(map(str, self._process_set.ranks)) if self.size < hvd.size() else ""
        results = []
        for i, tensor in enumerate(tensors):
            tensor = tf.convert_to_tensor(tensor)
            result = call(hide_constant(tensor), name=f"{name}{group}/{i}", process_set=self._process_set)
            shape = tf.TensorShape([None]).concatenate(tensor.shape[1:]) if rows_change else tensor.shape
            results.append(tf.reshape(result, []) if tensor.shape.rank == 0 else tf.ensure_shape(result, shape))
        return results
