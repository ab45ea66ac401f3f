"""Convolutions and maximum pooling of tensors without rows, which TensorFlow's kernels do not support.

Gradients of convolutions fail or are uninitialized memory, a dilated convolution returns a wrong shape, and the gradient of
maximum pooling ends the process. With more replicas than rows in a short last batch, some replicas have none.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras.src import backend

# Transposed convolutions get the number of rows as an argument, so they are patched where Keras has not computed it yet.
_OF_KERAS = ("conv", "depthwise_conv", "separable_conv", "conv_transpose")
_OF_TENSORFLOW = ("max_pool", "max_pool1d", "max_pool2d", "max_pool3d", "pool")
_supports: contextvars.ContextVar[bool] = contextvars.ContextVar("empty batches are supported", default=False)


@contextlib.contextmanager
def empty_batches_supported(supported: bool) -> Iterator[None]:
    """Context in which convolutions and poolings support tensors without rows, if the number of rows is not static.

    They compute one row of zeros instead, and return no rows. Cost: two conditions per operation, and no copy.

    Args:
      supported: False to leave the operations as they are: XLA cannot compile the conditions, and needs none.
    """
    _patch()
    token = _supports.set(supported)
    try:
        yield
    finally:
        _supports.reset(token)


@functools.cache
def _patch() -> None:
    """Patches the functions, once per process."""
    for module, names in ((backend.nn, _OF_KERAS), (tf.nn, _OF_TENSORFLOW)):
        for name in names:
            setattr(module, name, _supporting(getattr(module, name)))


def _supporting(operation: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    @functools.wraps(operation)
    def supporting(*args: Any, **kwargs: Any) -> tf.Tensor:
        inputs = args[0] if args else kwargs.get("input")  # as TensorFlow calls it
        if not (_supports.get() and isinstance(inputs, tf.Tensor) and inputs.shape.rank and inputs.shape[0] is None):
            return operation(*args, **kwargs)
        kwargs.pop("input", None)
        is_empty = tf.equal(tf.shape(inputs)[0], 0)
        some = tf.cond(is_empty, lambda: _one_row(inputs), lambda: inputs)
        outputs = operation(tf.ensure_shape(some, inputs.shape), *args[1:], **kwargs)
        return tf.ensure_shape(tf.cond(is_empty, lambda: outputs[:0], lambda: outputs), [None, *outputs.shape[1:]])

    return supporting


def _one_row(inputs: tf.Tensor) -> tf.Tensor:
    return tf.zeros(tf.concat([[1], tf.shape(inputs)[1:]], axis=0), inputs.dtype)
