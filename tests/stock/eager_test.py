"""`run_eagerly=True` on replicas: every process computes whole batches, so that values can be looked at, and printed."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.stock.comparing import both, differences

X = np.random.default_rng(0).normal(size=(22, 5))
Y = np.random.default_rng(1).normal(size=(22, 3))


class Looking(keras.layers.Layer):
    """Looks at its inputs, which a compiled step cannot."""

    def call(self, x: Any) -> Any:
        if tf.executing_eagerly():  # Keras traces it once, to find shapes
            assert np.isfinite(x.numpy()).all()
        return x


def make() -> keras.Model:
    layers = [keras.layers.Dense(4), Looking(), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((5,)), *layers])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], run_eagerly=True)
    return model


def used(model: keras.Model) -> Any:
    history = model.fit(X, Y, batch_size=8, epochs=2, validation_split=0.2, verbose=0).history
    return history, model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0), model.train_on_batch(X, Y)


def test_it_gives_one_device_s_numbers(float64: None, mirrored2: tfdist.Strategy) -> None:
    assert not differences(*both(mirrored2, make, used))


def test_before_and_behind_compiled_calls(float64: None, mirrored2: tfdist.Strategy) -> None:
    """Variables are those of all replicas, then those of one device, then those of all replicas again."""

    def without_looking() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), keras.layers.Dense(3)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        return model

    def in_turns(model: keras.Model) -> Any:
        found = [used(model)]
        for run_eagerly in (True, False):
            model.compile(model.optimizer, "mse", metrics=["mae"], run_eagerly=run_eagerly)
            found.append(used(model))
        return found

    assert not differences(*both(mirrored2, without_looking, in_turns))
