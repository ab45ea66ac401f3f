"""Scalars in Keras's means, such as a metric function that returns the mean of its batch.

`keras.metrics.Mean` counts a scalar as 1. That is right for a whole batch, but on a replica the scalar is a mean over the
replica's own rows: it must count as these rows do.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals

_weight: contextvars.ContextVar[tf.Tensor | None] = contextvars.ContextVar("weight of scalars", default=None)


@contextlib.contextmanager
def scalars_weighted(weight: tf.Tensor | None) -> Iterator[None]:
    """Context in which `keras.metrics.Mean`, and what is derived from it, weights scalars that have no weight.

    Values with rows are averaged over rows as always. A scalar in `keras.metrics.Sum` is added as it is: whether it is a
    sum or a mean over rows is unknown. A mean that is updated inside a `tf.function` of the model's code is not weighted,
    because such a function is not traced again for each caller.

    Args:
      weight: scalar, floating; the replica's part of the rows of a batch, so that all parts add up to one scalar. None for
        unpatched Keras.
    """
    _patch()
    token = _weight.set(weight)
    try:
        yield
    finally:
        _weight.reset(token)


@functools.cache
def _patch() -> None:
    original = keras.metrics.Mean.update_state

    @functools.wraps(original)
    def update_state(self: keras.metrics.Mean, values: Any, sample_weight: Any = None) -> None:
        weight = _weight.get()
        if (
            weight is None
            or sample_weight is not None
            or not _is_scalar(values)
            or not keras_internals.in_function_of(weight)
        ):
            original(self, values, sample_weight)
            return
        original(self, values, tf.cast(weight, self.dtype))

    keras.metrics.Mean.update_state = update_state


def _is_scalar(values: Any) -> bool:
    return len(keras.ops.convert_to_tensor(values).shape) == 0
