"""Predicts in float64 with a model that has been trained, for numbers of rows that nothing divides."""

import pathlib
from typing import Any

import keras
import numpy as np

import tfdist

SIZES = ((13, 4), (1, 8), (8, 4), (3, 2))  # (rows, batch size)


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.standard_normal((16, 6)), random.integers(0, 3, 16)


def make_trainer(strategy: tfdist.Strategy) -> tfdist.Trainer:
    """Returns a trainer whose model has two outputs, and moving statistics that differ between replicas in training."""
    keras.utils.set_random_seed(strategy.cluster.rank)  # processes must not depend on equal initial values
    if strategy.name == "mesh":
        keras.utils.set_random_seed(0)
    with strategy.scope():
        inputs = keras.Input((6,))
        hidden = keras.layers.Dense(8, activation="tanh", name="up")(inputs)
        hidden = keras.layers.Dropout(0.5)(keras.layers.BatchNormalization(synchronized=False)(hidden))
        outputs = [keras.layers.Dense(4, name="logits")(hidden), keras.layers.Dense(2, name="scale")(hidden)]
        return tfdist.Trainer(
            keras.Model(inputs, {"logits": outputs[0], "scale": outputs[1]}),
            optimizer=keras.optimizers.SGD(0.1),
            loss={"logits": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
        )


class Centered(keras.layers.Layer):
    """Subtracts the mean over the rows of the global batch."""

    def call(self, inputs):
        return inputs - keras.ops.mean(tfdist.gather_rows(inputs), axis=0)


def work(strategy: tfdist.Strategy, directory: pathlib.Path) -> tuple[list[Any], list[Any]]:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    return predictions(strategy, directory), evaluations(strategy)


def evaluations(strategy: tfdist.Strategy) -> list[Any]:
    """Returns the evaluations of a model that gathers rows, for each of `SIZES`."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.Input((6,)), keras.layers.Dense(4, "tanh"), Centered(), keras.layers.Dense(1)]
        trainer = tfdist.Trainer(keras.Sequential(layers), optimizer="sgd", loss="mse", metrics=["mae"])
    x, y = data()
    return [trainer.evaluate(x[:rows], y[:rows, None], batch_size=size) for rows, size in SIZES]


def predictions(strategy: tfdist.Strategy, directory: pathlib.Path) -> list[Any]:
    x, y = data()
    trainer = make_trainer(strategy)
    trainer.build((x, {"logits": y}))
    trainer.resume(str(directory))
    return [trainer.predict(x[:rows], batch_size=size, verbose=0) for rows, size in SIZES]
