"""Collectives without communication, for measuring the time of a step without it."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives.forwarding import ForwardingCollectives
from tfdist.collectives.interface import Collectives
from tfdist.collectives.no_constant_folding import runtime_zero


class NoCommunication(ForwardingCollectives):
    """Returns results of the right shapes and dtypes, computed from this replica's tensors only.

    The values are as if all replicas had the same tensors, except that sums are not multiplied by the number of replicas.
    Only numbers of rows are communicated, as results have the rows of all replicas. For timing only, never for training.
    """

    # Those of the base class are composed of the operations below.
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
        """Communicates scalars, such as the number of rows."""
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
    """Repeats rows up to a total number; zeros if there are none."""
    padded_rows = tf.concat([rows, tf.zeros([1, *rows.shape[1:]], rows.dtype)], 0)
    return tf.gather(padded_rows, tf.range(total) % tf.maximum(tf.shape(rows)[0], 1))
