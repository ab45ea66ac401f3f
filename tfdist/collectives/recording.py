"""A wrapper around collectives that records calls and the payload that a replica sends."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.interface import Collectives, Op


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """A recorded call; recorded during tracing in `tf.function`, else when it is executed.

    Attributes:
      operation: name of the method.
      name: name of the call, as given by the caller.
      dtypes: dtype of each tensor.
      shapes: static shape of each tensor; None for a dim that is unknown during tracing.
    """

    operation: str
    name: str
    dtypes: tuple[tf.DType, ...]
    shapes: tuple[tuple[int | None, ...], ...]

    @property
    def payload_bytes(self) -> int:
        """The bytes that one replica passes in; unknown dims count as 0."""
        sizes = (tf.TensorShape([dim or 0 for dim in shape]).num_elements() for shape in self.shapes)
        return sum(size * dtype.size for size, dtype in zip(sizes, self.dtypes, strict=True))


class Recording(Collectives):
    """Collectives that record the calls made through them.

    Attributes:
      calls: the calls so far.
    """

    def __init__(self, inner: Collectives):
        """Wraps other collectives.

        Args:
          inner: collectives that do the work.
        """
        self._inner = inner
        self.size = inner.size
        self.wire = inner.wire
        self.calls: list[RecordedCall] = []

    @property
    def rank(self) -> tf.Tensor | int:
        """See base class."""
        return self._inner.rank

    @property
    def payload_bytes(self) -> int:
        """The payload of all calls recorded so far, in bytes per replica."""
        return sum(call.payload_bytes for call in self.calls)

    @property
    def has_unknown_shapes(self) -> bool:
        """Whether a shape was unknown when a call was traced, so that it may change from step to step."""
        return any(None in shape for call in self.calls for shape in call.shapes)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""
        self._record("all_reduce", tensors, name)
        return self._inner.all_reduce(tensors, op, name=name)

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class."""
        self._record("all_gather", tensors, name)
        return self._inner.all_gather(tensors, name=name)

    def reduce_scatter(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""
        self._record("reduce_scatter", tensors, name)
        return self._inner.reduce_scatter(tensors, op, name=name)

    def all_to_all(
        self, tensors: Sequence[tf.Tensor], *, name: str, splits: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """See base class; splits do not count as payload."""
        self._record("all_to_all", tensors, name)
        return self._inner.all_to_all(tensors, name=name, splits=splits)

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        """See base class."""
        self._record("broadcast", tensors, name)
        return self._inner.broadcast(tensors, root, name=name)

    def barrier(self, *, name: str) -> tf.Operation | tf.Tensor:
        """See base class."""
        self._record("barrier", [], name)
        return self._inner.barrier(name=name)

    def _record(self, operation: str, tensors: Sequence[tf.Tensor], name: str) -> None:
        shapes = tuple(tuple(tf.convert_to_tensor(tensor).shape.as_list()) for tensor in tensors)
        self.calls.append(RecordedCall(operation, name, tuple(tf.as_dtype(t.dtype) for t in tensors), shapes))
