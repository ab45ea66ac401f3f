"""Casts for dtypes that an engine does not support, to a supported dtype that represents all of their values."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.interface import Collectives

_CARRIERS = {
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
    tf.uint32: tf.int64,
    tf.bfloat16: tf.float32,
}


def to_transferable(tensor: tf.Tensor, collectives: Collectives) -> tf.Tensor:
    """Casts a tensor to a dtype that the engine can gather and broadcast; casting back restores it exactly."""
    if tensor.dtype in collectives.wire.gathers:
        return tensor
    return tf.cast(tensor, _CARRIERS.get(tensor.dtype, tensor.dtype))


def from_first(tensors: Sequence[tf.Tensor], collectives: Collectives) -> list[tf.Tensor]:
    """Returns the first replica's tensors, on every replica."""
    arrived = collectives.broadcast([to_transferable(tensor, collectives) for tensor in tensors], name="from_first")
    return [tf.cast(value, tensor.dtype) for value, tensor in zip(arrived, tensors, strict=True)]
