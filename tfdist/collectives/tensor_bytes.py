"""The size of tensors in memory and in messages."""

import tensorflow as tf


def tensor_bytes(tensor: tf.TensorSpec | tf.Tensor | tf.IndexedSlices) -> int:
    """Returns the bytes of the elements of a tensor, or of one that a spec describes; the shape must be static."""
    return int(tensor.shape.num_elements() * tensor.dtype.size)
