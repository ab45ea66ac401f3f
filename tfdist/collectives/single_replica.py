"""Collectives of one replica: no communication. Also the shortest complete implementation of the contract."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.interface import Collectives, Op, Wire

ANYTHING = frozenset(
    [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.uint8, tf.int32, tf.int64, tf.bool, tf.uint32]
)


class OneReplica(Collectives):
    """A group of one replica: every operation returns its input."""

    size = 1
    rank = 0
    wire = Wire(reduces=ANYTHING, gathers=ANYTHING, packed=tf.uint8)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""
        return list(tensors)

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class."""
        return list(tensors)
