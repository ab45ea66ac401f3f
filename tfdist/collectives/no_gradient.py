"""Refuses gradients of operations that have none, or that engines differentiate as if there were one replica."""

from collections.abc import Sequence

import tensorflow as tf


def without_gradient(tensors: Sequence[tf.Tensor], operation: str) -> list[tf.Tensor]:
    """Returns the same tensors, which raise `LookupError` when a gradient passes through them.

    Args:
      tensors: what a replica passes to an operation, or its results, if TensorFlow has an error of its own for the operation.
      operation: name of the operation, for the error.
    """
    message = (
        f"{operation} of these Collectives does not differentiate. Call tfdist.collectives.all_reduce(collectives, tensor, "
        "name=...) or tfdist.collectives.all_gather, which do."
    )
    given = [tf.convert_to_tensor(tensor) for tensor in tensors]
    return [tf.raw_ops.PreventGradient(input=x, message=message) if x.dtype.is_floating else x for x in given]
