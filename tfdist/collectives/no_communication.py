"""Collectives without communication, to measure the cost of a step without it."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.interface import Collectives, Op
from tfdist.collectives.no_constant_folding import zero_when_run


class NoCommunication(Collectives):
    """Returns results of the right shapes and dtypes, computed from this replica's tensors only.

    The values are those of a group in which every replica has the same tensors, except that sums are not multiplied by
    the number of replicas. For timing only, never for training.
    """

    def __init__(self, like: Collectives):
        """Copies the properties of other collectives.

        Args:
          like: collectives whose size, rank and wire are used.
        """
        self._like = like
        self.size = like.size
        self.wire = like.wire

    @property
    def rank(self) -> tf.Tensor | int:
        """See base class."""
        return self._like.rank

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""
        return [tf.identity(tensor) for tensor in tensors]

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class."""
        return [tf.concat([tensor] * self.size, axis=0) for tensor in tensors]

    def all_to_all(
        self, tensors: Sequence[tf.Tensor], *, name: str, splits: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """See base class; with splits, as many rows as this replica sends: the real number would take a message."""
        return [tf.identity(tensor) for tensor in tensors]

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        """See base class."""
        return [tf.identity(tensor) for tensor in tensors]

    def group(self, ranks: Sequence[int]) -> "NoCommunication":
        """See base class."""
        return NoCommunication(self._like.group(ranks))

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        """See base class."""
        self.check_message(tensors, to, tag)
        with tf.control_dependencies([tf.convert_to_tensor(tensor) for tensor in tensors]):
            return zero_when_run()

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        """See base class; zeros, which graph optimization does not know."""
        self.check_message(specs, source, tag)
        return [tf.fill(spec.shape, tf.cast(zero_when_run(), spec.dtype)) for spec in specs]
