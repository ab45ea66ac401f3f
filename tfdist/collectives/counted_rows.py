"""Collectives for code of a replica that computes a row which must not count, since it has none of the batch."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.forwarding import ForwardingCollectives
from tfdist.collectives.interface import Collectives, Op


def counting(collectives: Collectives, rows: tf.Tensor) -> Collectives:
    """Returns collectives for the code of a replica of which `rows` count; a single replica always has rows that do."""
    return collectives if collectives.size == 1 else CountedRows(collectives, rows > 0)


class CountedRows(ForwardingCollectives):
    """Collectives in which a replica without rows communicates what no rows at all would give.

    These are zeros in sums and stacks, the lowest number in maxima, and no rows in what is gathered. Messages, and what is
    sent by `broadcast` and `all_to_all`, are unchanged. Cost: a selection of each tensor.
    """

    def __init__(self, inner: Collectives, has_rows: tf.Tensor):
        """Wraps other collectives.

        Args:
          inner: collectives to which calls are forwarded.
          has_rows: scalar bool; whether what this replica computes counts.
        """
        super().__init__(inner)
        self._has_rows = has_rows

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""
        return super().all_reduce(self._or_neutral(tensors, op), op, name=name)

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class."""
        counted = [tensor[: tf.where(self._has_rows, tf.shape(tensor)[0], 0)] for tensor in tensors]
        return super().all_gather(counted, name=name)

    def stack(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class."""
        return super().stack(self._or_neutral(tensors, "sum"), name=name)

    def reduce_scatter(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""
        return super().reduce_scatter(self._or_neutral(tensors, op), op, name=name)

    def group(self, ranks: Sequence[int]) -> Collectives:
        """See base class."""
        return CountedRows(super().group(ranks), self._has_rows)

    def _or_neutral(self, tensors: Sequence[tf.Tensor], op: Op) -> list[tf.Tensor]:
        given = [tf.convert_to_tensor(tensor) for tensor in tensors]
        return [tf.where(self._has_rows, x, _lowest(x.dtype) if op == "max" else tf.zeros([], x.dtype)) for x in given]


def _lowest(dtype: tf.DType) -> tf.Tensor:
    return tf.constant(float("-inf") if dtype.is_floating else dtype.min, dtype)
