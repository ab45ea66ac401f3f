"""A wrapper of any collectives that counts calls and the payload which a replica hands over."""

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.contract import Collectives, Op


@dataclasses.dataclass(frozen=True)
class Call:
    """One call, as seen when it was traced (in `tf.function`) or made (eagerly).

    Attributes:
      operation: the method's name.
      name: the caller's name for it.
      dtypes: one for each tensor.
      shapes: static shapes, None where a dim is not known when tracing.
    """

    operation: str
    name: str
    dtypes: tuple[tf.DType, ...]
    shapes: tuple[tuple[int | None, ...], ...]

    @property
    def payload_bytes(self) -> int:
        """What one replica hands over, in bytes; dims that are not known count as 0."""
        sizes = (tf.TensorShape([dim or 0 for dim in shape]).num_elements() for shape in self.shapes)
        return sum(size * dtype.size for size, dtype in zip(sizes, self.dtypes, strict=True))


class Recording(Collectives):
    """Collectives that keep a list of the calls made through them, in `calls`."""

    def __init__(self, inner: Collectives):
        """Args: inner: the collectives that do the work."""
        self._inner = inner
        self.size = inner.size
        self.wire = inner.wire
        self.calls: list[Call] = []

    @property
    def rank(self) -> tf.Tensor | int:
        """See base class."""
        return self._inner.rank

    @property
    def payload_bytes(self) -> int:
        """The payload of all calls recorded so far, in bytes for each replica."""
        return sum(call.payload_bytes for call in self.calls)

    @property
    def has_unknown_shapes(self) -> bool:
        """Whether a shape was not known when a call was traced: what is sent may have another in each step."""
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
        """See base class; splits are no payload."""
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
        self.calls.append(Call(operation, name, tuple(tf.as_dtype(t.dtype) for t in tensors), shapes))
