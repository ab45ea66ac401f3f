"""Rows of numbers, and small models that are fitted to them."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

import tfdist

ops = keras.ops

X = np.random.default_rng(0).normal(size=(22, 5))
Y = np.random.default_rng(1).normal(size=(22, 3))


def sequential(*layers: Any, **compiled: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), *layers])
    model.compile(**({"optimizer": keras.optimizers.SGD(0.05), "loss": "mse"} | compiled))
    return model


def functional(step: Callable[..., Any], **compiled: Any) -> keras.Model:
    """Returns a functional model with a custom train_step."""
    inputs = keras.Input((5,))
    model = type("Own", (keras.Model,), {"train_step": step})(inputs, keras.layers.Dense(3)(inputs))
    model.compile(**({"optimizer": keras.optimizers.SGD(0.05)} | compiled))
    return model


def fitted(model: keras.Model) -> Any:
    return model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history


class Shared(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x / (1.0 + ops.sum(tfdist.gather_rows(x) ** 2, axis=0))


class StartsFromABatch(keras.layers.Layer):
    """Initializes itself with the mean of its first batch, as ActNorm does."""

    def build(self, shape: Any) -> None:
        self.shift = self.add_weight(shape=(shape[-1],), initializer="zeros")
        self.has_begun = self.add_weight(shape=(), initializer="zeros", dtype="bool", trainable=False)

    def call(self, x: Any) -> Any:
        self.shift.assign(ops.where(self.has_begun, self.shift, ops.mean(x, axis=0)))
        self.has_begun.assign(True)
        return x - self.shift


class Static(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x * (1.0 if x.shape[0] is None else 0.1 * x.shape[0])
