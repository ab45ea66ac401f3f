"""Messages between stages: activations and their gradients as the dtypes that an engine carries."""

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.collectives import Collectives, Wire
from tfdist.collectives.tensor_bytes import tensor_bytes
from tfdist.pipelining.activation_compression import EXACT, ActivationCompression

_CARRIERS = {2: tf.float16, 4: tf.int32, 8: tf.int64}  # by size of an element; every engine carries them


class Link(NamedTuple):
    """The connection of this process to another stage of its pipeline.

    Attributes:
      collectives: collectives of the pipeline's processes, whose ranks are their stages.
      other: rank of the other process among them.
      compression: compression of the tensors; both processes must use the same.
    """

    collectives: Collectives
    other: int
    compression: ActivationCompression = EXACT

    def send(self, tensors: Sequence[tf.Tensor], tag: str) -> None:
        """Sends tensors of static shapes; does nothing if there are none."""
        if tensors:
            wire = self.collectives.wire
            encoded = [self.compression.encode(tensor, wire) for tensor in tensors]
            self.collectives.send(
                [_as(tensor, _carrier(tensor.dtype, wire)) for tensor in encoded], self.other, tag=tag
            )

    def receive(self, specs: Sequence[tf.TensorSpec], tag: str) -> list[tf.Tensor]:
        """Returns the tensors that the other process sends with this tag, of static shapes."""
        if not specs:
            return []
        wire = self.collectives.wire
        encoded = [self.compression.sent_as(spec, wire) for spec in specs]
        carried = [_carried(spec, wire) for spec in encoded]
        found = self.collectives.receive(carried, self.other, tag=tag)
        codes = [_as(tensor, spec.dtype) for tensor, spec in zip(found, encoded, strict=True)]
        return [self.compression.decode(code, spec, wire) for code, spec in zip(codes, specs, strict=True)]


def message_bytes(spec: tf.TensorSpec, compression: ActivationCompression, wire: Wire) -> int:
    """Returns the bytes that a tensor of static shape has in a message."""
    return tensor_bytes(_carried(compression.sent_as(spec, wire), wire))


def _carried(spec: tf.TensorSpec, wire: Wire) -> tf.TensorSpec:
    return tf.TensorSpec(spec.shape, _carrier(spec.dtype, wire))


def _carrier(dtype: tf.DType, wire: Wire) -> tf.DType:
    return dtype if dtype in wire.sends else _CARRIERS.get(dtype.size, tf.int32)


def _as(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns a tensor with the same bytes as another dtype of this size; small integers and booleans are cast."""
    if tensor.dtype == dtype:
        return tensor
    return tf.bitcast(tensor, dtype) if tensor.dtype.size == dtype.size else tf.cast(tensor, dtype)
