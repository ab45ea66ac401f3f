"""Messages between stages: activations and their gradients as the dtypes that an engine carries."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.collectives import Collectives

_CARRIERS = {2: tf.float16, 4: tf.int32, 8: tf.int64}  # by size of an element; every engine carries them


class Link(NamedTuple):
    """The connection of this process to another stage of its pipeline.

    Attributes:
      collectives: collectives of the pipeline's processes, whose ranks are their stages.
      other: rank of the other process among them.
    """

    collectives: Collectives
    other: int

    def send(self, tensors: Sequence[tf.Tensor], tag: str) -> None:
        """Sends tensors of static shapes; does nothing if there are none."""
        if tensors:
            self.collectives.send([_as(tensor, self._carrier(tensor.dtype)) for tensor in tensors], self.other, tag=tag)

    def receive(self, specs: Sequence[tf.TensorSpec], tag: str) -> list[tf.Tensor]:
        """Returns the tensors that the other process sends with this tag, of static shapes."""
        if not specs:
            return []
        packed = [tf.TensorSpec(spec.shape, self._carrier(spec.dtype)) for spec in specs]
        found = self.collectives.receive(packed, self.other, tag=tag)
        return [_as(tensor, spec.dtype) for tensor, spec in zip(found, specs, strict=True)]

    def _carrier(self, dtype: tf.DType) -> tf.DType:
        return dtype if dtype in self.collectives.wire.gathers else _CARRIERS.get(dtype.size, tf.int32)


def _as(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns a tensor with the same bytes as another dtype of this size; small integers and booleans are cast."""
    if tensor.dtype == dtype:
        return tensor
    return tf.bitcast(tensor, dtype) if tensor.dtype.size == dtype.size else tf.cast(tensor, dtype)
