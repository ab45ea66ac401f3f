"""`run_eagerly=True` on replicas: every process computes global batches, so that values can be inspected and printed."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.keras_fit.comparing import Compare
from tests.keras_fit.rows import X, Y, functional, sequential


class Looking(keras.layers.Layer):
    """Inspects the values of its inputs, which is impossible in a compiled step."""

    def call(self, x: Any) -> Any:
        if tf.executing_eagerly():  # Keras also traces it once to infer shapes
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


def test_it_gives_one_device_s_numbers(as_one_device: Compare) -> None:
    as_one_device(make, used)


def test_before_and_behind_compiled_calls(as_one_device: Compare) -> None:
    """Variables are placed on all replicas, then on one device, then on all replicas again."""

    def in_turns(model: keras.Model) -> Any:
        found = []
        for run_eagerly in (False, True, False):
            model.compile(model.optimizer, "mse", metrics=["mae"], run_eagerly=run_eagerly)
            history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history
            found.append((history, model.predict(X, verbose=0)))
        return found

    as_one_device(
        lambda: sequential(keras.layers.Dense(3), optimizer=keras.optimizers.Adam(0.01), metrics=["mae"]), in_turns
    )


def test_an_error_leaves_equal_replicas_behind(float64: None, mirrored2: tfdist.Strategy) -> None:
    model = tfdist.distribute(make(), mirrored2)

    def end(batch: int, logs: Any) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=end)])
    for variable in model.variables:
        first, second = mirrored2.local(variable.value)
        np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


def test_metrics_of_one_s_own_begin_anew_when_steps_are_compiled_again(as_one_device: Compare) -> None:
    def train_step(self: Any, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((y - self(x, training=True)) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def own() -> keras.Model:
        model = functional(train_step, optimizer="sgd", run_eagerly=True)
        model.tracker = keras.metrics.Mean(name="loss")
        return model

    def in_turns(model: keras.Model) -> Any:
        found = [model.fit(X[:16], Y[:16], batch_size=8, verbose=0).history]
        model.compile("sgd")
        found.append(model.fit(X[:16], Y[:16], batch_size=8, verbose=0).history)
        model.run_eagerly = True
        return [*found, model.fit(X[:16], Y[:16], batch_size=8, verbose=0).history]

    as_one_device(own, in_turns)
