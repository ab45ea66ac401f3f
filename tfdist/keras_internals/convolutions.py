"""Keras's convolutions of tensors without rows, which TensorFlow's kernels do not support.

Their gradients fail or are uninitialized memory, and a dilated convolution returns a wrong shape. With more replicas than rows
in a short last batch, some replicas have none.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras.src import backend

_NAMES = ("conv", "depthwise_conv", "separable_conv", "conv_transpose")
_supports: contextvars.ContextVar[bool] = contextvars.ContextVar("convolutions support no rows", default=False)


@contextlib.contextmanager
def convolutions_of_no_rows(supported: bool) -> Iterator[None]:
    """Context in which convolutions support tensors without rows, if the number of rows is not static.

    They compute one row of zeros instead, and return no rows. Cost: two conditions per convolution, and no copy.

    Args:
      supported: False to leave convolutions as they are: XLA cannot compile the conditions, and needs none.
    """
    _patch()
    token = _supports.set(supported)
    try:
        yield
    finally:
        _supports.reset(token)


@functools.cache
def _patch() -> None:
    """Patches Keras's functions, once per process."""
    for name in _NAMES:
        setattr(backend.nn, name, _supporting(getattr(backend.nn, name)))


def _supporting(convolve: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    @functools.wraps(convolve)
    def supporting(inputs: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
        if not (_supports.get() and isinstance(inputs, tf.Tensor) and inputs.shape[0] is None):
            return convolve(inputs, *args, **kwargs)
        is_empty = tf.equal(tf.shape(inputs)[0], 0)
        some = tf.cond(is_empty, lambda: _one_row(inputs), lambda: inputs)
        outputs = convolve(tf.ensure_shape(some, inputs.shape), *args, **kwargs)
        return tf.ensure_shape(tf.cond(is_empty, lambda: outputs[:0], lambda: outputs), [None, *outputs.shape[1:]])

    return supporting


def _one_row(inputs: tf.Tensor) -> tf.Tensor:
    return tf.zeros(tf.concat([[1], tf.shape(inputs)[1:]], axis=0), inputs.dtype)
