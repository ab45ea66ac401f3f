"""Trains with layers that add a mean or a sum to the loss, and keep a metric and a mean; returns history and errors."""

import pathlib
from typing import Any

import keras
import numpy as np

import tfdist
from tests.caught import error_of

ops = keras.ops
X, Y = np.random.default_rng(0).normal(size=(2, 32, 4)).astype("float32")


class Measured(keras.layers.Layer):
    def __init__(self, penalty: Any):
        super().__init__(name="measured")
        self.size, self.penalty = keras.metrics.Mean(name="size"), penalty

    def call(self, x: Any) -> Any:
        self.size.update_state(ops.mean(ops.abs(x)))
        self.add_loss(0.1 * self.penalty(ops.square(x)))
        return x


class Centering(keras.layers.Layer):
    """Subtracts the moving mean of the rows of earlier steps."""

    def build(self, shape: Any) -> None:
        self.center = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False, name="center")

    def call(self, x: Any, training: bool = False) -> Any:
        centered = x - self.center
        if training:
            self.center.assign(0.9 * self.center + 0.1 * ops.mean(x, axis=0))
        return centered


def error(y: Any, outputs: Any) -> Any:
    """A metric that depends on all rows of a batch."""
    return ops.sqrt(ops.mean(ops.square(tfdist.gather_rows(y) - tfdist.gather_rows(outputs))))


def largest(x: Any) -> Any:
    """A loss that depends on all rows of a batch."""
    return ops.mean(x) / ops.max(x)


def fit(strategy: tfdist.Strategy, penalty: Any, *, centering: bool = True, **options: Any) -> dict[str, Any]:
    keras.utils.set_random_seed(0)
    with strategy.scope():
        inputs = keras.Input([4])
        measured = Measured(penalty)(keras.layers.Dense(3)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(4)(Centering()(measured) if centering else measured))
        given: dict[str, Any] = {"loss": lambda a, b: ops.mean(ops.square(a - b)), "metrics": [error], **options}
        trainer = tfdist.Trainer(model, optimizer="sgd", **given)
    history: dict[str, Any] = trainer.fit(X, Y, batch_size=8, epochs=2, verbose=0).history
    return history


def work(strategy: tfdist.Strategy, directory: pathlib.Path) -> tuple[dict[str, Any], str, dict[str, Any]]:
    refused = error_of(lambda: fit(strategy, largest, sync="local_sgd(period=2)"))
    return fit(strategy, ops.mean), refused, fit(strategy, largest)
