"""Wrappers of collectives: the base class, a sequential one, one that records calls, and one without communication."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.interface import Collectives, Op
from tfdist.collectives.no_constant_folding import runtime_zero


class ForwardingCollectives(Collectives):
    """Collectives that forward calls to other collectives; subclasses change some of the operations."""

    def __init__(self, inner: Collectives):
        self._inner = inner
        self.size = inner.size
        self.dtypes = inner.dtypes

    def _forward(self, operation: str, tensors: Sequence[tf.Tensor], *args: Any, **options: Any) -> list[tf.Tensor]:
        """Forwards a collective operation, the name of a method of `Collectives`."""
        return getattr(self._inner, operation)(tensors, *args, **options)

    @property
    def rank(self) -> tf.Tensor | int:
        return self._inner.rank

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        return self._forward("all_reduce", tensors, op, name=name)

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        return self._forward("all_gather", tensors, name=name)

    def stack(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        return self._forward("stack", tensors, name=name)

    def reduce_scatter(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        return self._forward("reduce_scatter", tensors, op, name=name)

    def all_to_all(
        self, tensors: Sequence[tf.Tensor], *, name: str, splits: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        return self._forward("all_to_all", tensors, name=name, splits=splits)

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        return self._forward("broadcast", tensors, root, name=name)

    def barrier(self, *, name: str) -> tf.Operation | tf.Tensor:
        return self._inner.barrier(name=name)

    def group(self, ranks: Sequence[int]) -> Collectives:
        return self._inner.group(ranks)

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        return self._inner.send(tensors, to, tag=tag)

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        return self._inner.receive(specs, source, tag=tag)


# About 0.1 s at 100 Mbit/s. On faster links, the latency of a message dominates.
PIECE_BYTES = 1024 * 1024


class SequentialCollectives(ForwardingCollectives):
    """Collectives that run sequentially; all-reduces and all-gathers split large tensors into pieces of `piece_bytes` or less.

    An engine sends messages in the order in which it receives them. If a large exchange were passed to it at once during
    training steps, the small messages of the steps would wait for all of it. One instance serves one trace of one replica.
    Tensors without a static shape are not split. Static shapes must be equal on all ranks, even in an all-gather.
    """

    def __init__(self, inner: Collectives, piece_bytes: int = PIECE_BYTES):
        super().__init__(inner)
        self._piece_bytes = piece_bytes
        self._last_results: list[tf.Tensor] = []

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        results = []
        for i, tensor in enumerate(map(tf.convert_to_tensor, tensors)):
            vector = tf.reshape(tensor, [-1])
            sums = [
                self._forward("all_reduce", [x], op, name=f"{name}/{i}/{k}")[0]
                for k, x in enumerate(self._pieces(vector))
            ]
            results.append(tf.ensure_shape(tf.reshape(tf.concat(sums, 0), tf.shape(tensor)), tensor.shape))
        return results

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        results = []
        for i, tensor in enumerate(map(tf.convert_to_tensor, tensors)):
            pieces = self._pieces(tensor)
            parts = [self._forward("all_gather", [x], name=f"{name}/{i}/{k}")[0] for k, x in enumerate(pieces)]
            if len(parts) > 1:
                by_rank = [tf.reshape(x, [self.size, *piece.shape]) for x, piece in zip(parts, pieces, strict=True)]
                parts = [tf.reshape(tf.concat(by_rank, 1), [self.size * tensor.shape[0], *tensor.shape[1:]])]
            results += parts
        return results

    def _pieces(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        if not tensor.shape.is_fully_defined():
            return [tensor]
        rows = tensor.shape[0]
        row_bytes = max(1, tensor.shape[1:].num_elements() * tensor.dtype.size)
        piece_rows = max(1, self._piece_bytes // row_bytes)
        sizes = [min(piece_rows, rows - start) for start in range(0, rows, piece_rows)]
        return tf.split(tensor, sizes) if len(sizes) > 1 else [tensor]

    def _forward(self, operation: str, tensors: Sequence[tf.Tensor], *args: Any, **options: Any) -> list[tf.Tensor]:
        """See base class. The operation begins when the previous one has ended."""
        with tf.control_dependencies(self._last_results):
            inputs = [tf.identity(tensor) for tensor in tensors]
        self._last_results = super()._forward(operation, inputs, *args, **options)
        return self._last_results


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """A call that was recorded when it was traced in a `tf.function`, or executed eagerly.

    Attributes:
      operation: name of the method.
      name: the caller's name for the call.
      dtypes: dtype of each tensor.
      shapes: static shape of each tensor; None for a dim that is unknown during tracing.
      ranks: the ranks that communicate, as numbered in the outermost recording; for a message, the sender and the
        receiver. None for all replicas.
    """

    operation: str
    name: str
    dtypes: tuple[tf.DType, ...]
    shapes: tuple[tuple[int | None, ...], ...]
    ranks: tuple[int, ...] | None = None

    @property
    def payload_bytes(self) -> int:
        """The number of bytes that one replica passes in; unknown dims and received messages count as 0."""
        if self.operation == "receive":
            return 0
        sizes = (tf.TensorShape([dim or 0 for dim in shape]).num_elements() for shape in self.shapes)
        return sum(size * dtype.size for size, dtype in zip(sizes, self.dtypes, strict=True))


class RecordingCollectives(ForwardingCollectives):
    """Collectives that record the calls made through them and through their groups. Splits do not count as payload.

    Attributes:
      calls: the calls so far.
    """

    def __init__(
        self, inner: Collectives, calls: list[RecordedCall] | None = None, ranks: tuple[int, ...] | None = None
    ):
        """Wraps collectives; for a group, `calls` is the outermost recording's list, and `ranks` the ranks there."""
        super().__init__(inner)
        self.calls: list[RecordedCall] = [] if calls is None else calls
        self._ranks = ranks

    @property
    def payload_bytes(self) -> int:
        """The payload of all calls recorded so far, in bytes per replica."""
        return sum(call.payload_bytes for call in self.calls)

    @property
    def has_unknown_shapes(self) -> bool:
        """Whether the shape of a traced call was unknown and may change from step to step."""
        return any(None in shape for call in self.calls for shape in call.shapes)

    def group(self, ranks: Sequence[int]) -> "RecordingCollectives":
        """See base class. The calls of the group are added to `calls`."""
        outer_ranks = self._outer_ranks(self.check_ranks(ranks))
        has_all_ranks = self._ranks is None and outer_ranks == tuple(range(self.size))
        return RecordingCollectives(self._inner.group(ranks), self.calls, None if has_all_ranks else outer_ranks)

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        self.check_message(tensors, to, tag)
        self._add(
            "send", [tf.TensorSpec(x.shape, x.dtype) for x in tensors], tag, self._outer_ranks([self.static_rank, to])
        )
        return super().send(tensors, to, tag=tag)

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        self.check_message(specs, source, tag)
        self._add("receive", specs, tag, self._outer_ranks([source, self.static_rank]))
        return super().receive(specs, source, tag=tag)

    def _outer_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank if self._ranks is None else self._ranks[rank] for rank in ranks)

    def barrier(self, *, name: str) -> tf.Operation | tf.Tensor:
        self._add("barrier", [], name, self._ranks)
        return super().barrier(name=name)

    def _forward(self, operation: str, tensors: Sequence[tf.Tensor], *args: Any, **options: Any) -> list[tf.Tensor]:
        """See base class. A stack counts as a call of `all_gather`."""
        inputs = [tf.convert_to_tensor(tensor) for tensor in tensors]
        specs = [tf.TensorSpec([1] * (operation == "stack") + x.shape.as_list(), x.dtype) for x in inputs]
        self._add("all_gather" if operation == "stack" else operation, specs, options["name"], self._ranks)
        return super()._forward(operation, tensors, *args, **options)

    def _add(self, operation: str, specs: Sequence[tf.TensorSpec], name: str, ranks: tuple[int, ...] | None) -> None:
        shapes = tuple(tuple(spec.shape.as_list()) for spec in specs)
        self.calls.append(RecordedCall(operation, name, tuple(spec.dtype for spec in specs), shapes, ranks))


class NoCommunication(ForwardingCollectives):
    """Collectives without communication, to time a step: results of the right shapes and dtypes from local tensors only.

    The values are as if all replicas had the same tensors, except that sums are not multiplied by the number of replicas.
    Only row counts are communicated, because results have the rows of all replicas. Never use these collectives for training.
    """

    # The operations of the base class, which are composed of the operations below.
    reduce_scatter = Collectives.reduce_scatter
    barrier = Collectives.barrier

    def _forward(self, operation: str, tensors: Sequence[tf.Tensor], *args: Any, **options: Any) -> list[tf.Tensor]:
        """See base class. With splits, an all-to-all returns as many rows as this replica sends."""
        return [tf.identity(tensor) for tensor in tensors]

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        counts = [tf.shape(tensor)[0] for tensor in tensors if tensor.shape[0] is None]
        totals = iter([tf.reduce_sum(x) for x in self.stack(counts, name=f"{name}/number")] if counts else [])
        return [
            _repeat(tensor, next(totals)) if tensor.shape[0] is None else tf.concat([tensor] * self.size, axis=0)
            for tensor in tensors
        ]

    def stack(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class. Only scalars, such as the number of rows, are communicated."""
        if all(tensor.shape.rank == 0 for tensor in tensors):
            return self._inner.stack(tensors, name=name)
        return Collectives.stack(self, tensors, name=name)

    def group(self, ranks: Sequence[int]) -> "NoCommunication":
        return NoCommunication(self._inner.group(ranks))

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        self.check_message(tensors, to, tag)
        with tf.control_dependencies([tf.convert_to_tensor(tensor) for tensor in tensors]):
            return runtime_zero()

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        """See base class. Returns zeros that graph optimization cannot fold."""
        self.check_message(specs, source, tag)
        return [tf.fill(spec.shape, tf.cast(runtime_zero(), spec.dtype)) for spec in specs]


def _repeat(rows: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """Repeats rows up to a total number; returns zeros if there are no rows."""
    padded_rows = tf.concat([rows, tf.zeros([1, *rows.shape[1:]], rows.dtype)], 0)
    return tf.gather(padded_rows, tf.range(total) % tf.maximum(tf.shape(rows)[0], 1))
