"""Rows of numbers, and small models that are fitted to them."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

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
