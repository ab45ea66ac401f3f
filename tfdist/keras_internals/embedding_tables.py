"""Internals of Keras's embedding layers: what looks up rows, and initial values of some rows of a table."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.initializers import random_initializers
from tensorflow.python.ops import random_ops_util

from tfdist.keras_internals.patching import patched

_UNIFORM_OR_NORMAL = (keras.initializers.RandomUniform, keras.initializers.RandomNormal)
_TRUNCATED = (keras.initializers.TruncatedNormal,)
_SCALED = (
    keras.initializers.VarianceScaling,
    *(getattr(keras.initializers, f"{a}{b}") for a in ("Glorot", "He", "Lecun") for b in ("Uniform", "Normal")),
)
_CONSTANT = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)
_GROUPS = {tf.float32: 4, tf.float64: 2}  # numbers that the generator draws with one value of its counter
_RESERVED = 64  # values of the counter for a number of a group, where some draws are rejected; times the group's size


def is_only_looked_up(layer: keras.Layer) -> bool:
    """Returns whether a layer is a trained `keras.layers.Embedding` whose table nothing but its lookup reads."""
    return (
        type(layer) is keras.layers.Embedding
        and layer.trainable
        and layer.embeddings_regularizer is None
        and layer.embeddings_constraint is None
        and not layer.lora_rank
        and layer.quantization_mode is None
    )


def set_lookup(layer: keras.layers.Embedding, lookup: Callable[[Any], tf.Tensor]) -> None:
    """Makes a layer call a function (ids) instead of reading its table."""
    layer.__dict__["call"] = lookup  # bypasses Keras's tracking


def rows_initializer(variable: keras.Variable) -> Mapping[str, Any] | None:
    """Returns what `initial_rows` takes to draw some rows of a variable without a value.

    Returns:
      A description that JSON can express; None if the rows cannot be drawn without the others.
    """
    initializer = variable._initializer
    kinds = (*_UNIFORM_OR_NORMAL, *_TRUNCATED, *_SCALED, *_CONSTANT)
    if type(initializer) not in kinds or tf.as_dtype(variable.dtype) not in _GROUPS:
        return None
    config = initializer.get_config()
    if not isinstance(initializer, _CONSTANT):
        if not isinstance(initializer.seed, int):
            return None
        config["seed"] = initializer.seed  # which Keras has drawn, and does not write, if none was given
    elif not isinstance(config.get("value", 0), int | float):
        return None
    return keras.initializers.serialize(type(initializer).from_config(config))


def initial_rows(
    initializer: Mapping[str, Any], shape: tuple[int, int], dtype: str, begin: int, end: int
) -> np.ndarray:
    """Returns rows [begin, end) of the values that an initializer draws for a whole variable, bit for bit.

    The generator is a function of a seed and a counter, which each group of numbers increases by a constant.

    Args:
      initializer: result of `rows_initializer`.
      shape: shape of the variable.
      dtype: its dtype.
      begin: first row, a multiple of 4.
      end: row after the last.
    """
    draw = keras.initializers.deserialize(initializer)
    group = _GROUPS[tf.as_dtype(dtype)]
    rejects = isinstance(draw, _TRUNCATED) or getattr(draw, "distribution", "") == "truncated_normal"
    skipped = begin * shape[1] // group * (group * _RESERVED if rejects else 1)
    compute_fans = random_initializers.compute_fans

    def fans_of_all_rows(_: Any, *axes: Any, **named_axes: Any) -> Any:
        return compute_fans(shape, *axes, **named_axes)

    with _counter_moved(skipped), patched((random_initializers, "compute_fans", fans_of_all_rows)):
        return np.asarray(draw((end - begin, shape[1]), dtype=dtype))


@contextlib.contextmanager
def _counter_moved(by: int) -> Iterator[None]:
    """Context in which stateless random operations, called eagerly, begin at a later value of their counter of 128 bits."""
    original = random_ops_util.get_key_counter_alg

    @functools.wraps(original)
    def moved(seed: Any, alg: Any) -> Any:
        key, counter, algorithm = original(seed, alg)
        low, high = (int(part) for part in counter.numpy())
        value = (low + (high << 64) + by) % (1 << 128)
        return key, tf.constant([value & (1 << 64) - 1, value >> 64], tf.uint64), algorithm

    with patched((random_ops_util, "get_key_counter_alg", moved)), tf.device("CPU:0"):
        yield
