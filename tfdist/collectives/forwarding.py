"""Collectives that forward all calls to others: the base class of wrappers."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.interface import Collectives, Op


class ForwardingCollectives(Collectives):
    """Collectives that do what others do; subclasses change some of the operations."""

    def __init__(self, inner: Collectives):
        """Wraps other collectives.

        Args:
          inner: collectives to which calls are forwarded.
        """
        self._inner = inner
        self.size = inner.size
        self.wire = inner.wire

    def _on_call(self, operation: str, tensors: Sequence[tf.Tensor], name: str) -> None:
        """Called before an operation of all replicas is forwarded.

        Args:
          operation: name of the method.
          tensors: what the replica passes in; empty for a barrier.
          name: name of the call.
        """

    @property
    def rank(self) -> tf.Tensor | int:
        """See base class."""
        return self._inner.rank

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""
        self._on_call("all_reduce", tensors, name)
        return self._inner.all_reduce(tensors, op, name=name)

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class."""
        self._on_call("all_gather", tensors, name)
        return self._inner.all_gather(tensors, name=name)

    def stack(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class; a call of `all_gather`."""
        self._on_call("all_gather", [tf.expand_dims(tensor, 0) for tensor in tensors], name)
        return self._inner.stack(tensors, name=name)

    def reduce_scatter(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""
        self._on_call("reduce_scatter", tensors, name)
        return self._inner.reduce_scatter(tensors, op, name=name)

    def all_to_all(
        self, tensors: Sequence[tf.Tensor], *, name: str, splits: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """See base class."""
        self._on_call("all_to_all", tensors, name)
        return self._inner.all_to_all(tensors, name=name, splits=splits)

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        """See base class."""
        self._on_call("broadcast", tensors, name)
        return self._inner.broadcast(tensors, root, name=name)

    def barrier(self, *, name: str) -> tf.Operation | tf.Tensor:
        """See base class."""
        self._on_call("barrier", [], name)
        return self._inner.barrier(name=name)

    def group(self, ranks: Sequence[int]) -> Collectives:
        """See base class."""
        return self._inner.group(ranks)

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        """See base class."""
        return self._inner.send(tensors, to, tag=tag)

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        """See base class."""
        return self._inner.receive(specs, source, tag=tag)
