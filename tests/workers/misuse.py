"""Makes mistakes with a pipeline one after the other; returns what each raises."""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.caught import error_of

X, Y = np.ones((16, 3), "float32"), np.ones((16, 1), "float32")


def timed(x: tf.Tensor) -> tf.Tensor:
    return x + 0 * tf.cast(tf.timestamp(), x.dtype)


def train(strategy: tfdist.Strategy, x: Any = X, y: Any = Y, activation: Any = "relu", rate: float = 0.1) -> Any:
    """Returns the trainer and the model that it was given."""
    with strategy.scope():
        hidden = keras.layers.Dense(4, activation, name="hidden")
        model = keras.Sequential([keras.Input((3,)), hidden, keras.layers.Dense(1, name="last")])
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.SGD(rate), loss="mse")
    trainer.fit(x, y, batch_size=8, steps=1, verbose=0)
    return trainer, model


class Centering(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__(name="centering")
        self.center = self.add_weight(name="center", shape=(), trainable=False)

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        if training:
            self.center.assign(0.9 * self.center + 0.1 * tf.reduce_mean(x))
        return x - self.center


def freeze_and_train(strategy: tfdist.Strategy) -> None:
    trainer, model = train(strategy)
    model.get_layer("hidden").trainable = False  # of the first stage
    trainer.fit(X, Y, batch_size=8, steps=1, verbose=0)


def mistakes(strategy: tfdist.Strategy) -> Mapping[str, Callable[[], object]]:
    rank = strategy.cluster.rank
    drawn = np.random.default_rng(rank).standard_normal((16, 1)).astype("float32")  # as without a seed
    return {
        "targets": lambda: train(strategy, y=drawn),
        "form": lambda: train(strategy, y=np.ones((16, 1 + rank), "float32")),
        "activation": lambda: train(strategy, activation=("relu", "tanh")[rank]),
        "rate": lambda: train(strategy, rate=0.1 + rank),
        "width": lambda: train(strategy, x=X[:, :2]),
        "freeze": lambda: freeze_and_train(strategy),
        "predict": lambda: train(strategy)[1].predict(X),
        "call": lambda: train(strategy)[1](X),
        "state": lambda: train(strategy, activation=Centering()),
        "spectral": lambda: train(
            strategy, activation=keras.layers.SpectralNormalization(keras.layers.Dense(4, name="norm"))
        ),
        "operation": lambda: train(strategy, activation=timed),
    }


def work(strategy: tfdist.Strategy, directory: pathlib.Path, *names: str) -> dict[str, str]:
    return {name: error_of(mistakes(strategy)[name]) for name in names}
