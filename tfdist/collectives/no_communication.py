"""Collectives without communication, for measuring the time of a step without it."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.interface import Collectives, Op
from tfdist.collectives.no_constant_folding import runtime_zero


class NoCommunication(Collectives):
    """Returns results of the right shapes and dtypes, computed from this replica's tensors only.

    The values are as if all replicas had the same tensors, except that sums are not multiplied by the number of replicas.
    For timing only, never for training.
    """

    def __init__(self, collectives: Collectives):
        """Copies the size, rank and wire of other collectives."""
        self._collectives = collectives
        self.size = collectives.size
        self.wire = collectives.wire

    @property
    def rank(self) -> tf.Tensor | int:
        return self._collectives.rank

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        return [tf.identity(tensor) for tensor in tensors]

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        return [tf.concat([tensor] * self.size, axis=0) for tensor in tensors]

    def all_to_all(
        self, tensors: Sequence[tf.Tensor], *, name: str, splits: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """See base class. With splits, returns as many rows as this replica sends."""
        return [tf.identity(tensor) for tensor in tensors]

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        return [tf.identity(tensor) for tensor in tensors]

    def group(self, ranks: Sequence[int]) -> "NoCommunication":
        return NoCommunication(self._collectives.group(ranks))

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        self.check_message(tensors, to, tag)
        with tf.control_dependencies([tf.convert_to_tensor(tensor) for tensor in tensors]):
            return runtime_zero()

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        """See base class. Returns zeros that graph optimization cannot fold."""
        self.check_message(specs, source, tag)
        return [tf.fill(spec.shape, tf.cast(runtime_zero(), spec.dtype)) for spec in specs]
