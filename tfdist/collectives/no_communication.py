"""Collectives without communication, to measure the cost of a step without it."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.interface import Collectives, Op


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
