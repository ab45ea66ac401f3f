"""Metrics that are given a scalar for each batch: as in plain Keras on one device, in float64."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.keras_fit.comparing import both, differences
from tests.keras_fit.models import error
from tests.selection import quick

layers = keras.layers
X = np.random.default_rng(0).normal(size=(19, 5))
Y = np.random.default_rng(1).normal(size=(19, 1))


class Size(layers.Layer):
    """Reports the mean size of its inputs, and a value that does not depend on the rows."""

    def __init__(self) -> None:
        super().__init__(name="sizes")
        self.size, self.constant = keras.metrics.Mean(name="size"), keras.metrics.Mean(name="constant")

    def call(self, x: Any) -> Any:
        self.size.update_state(keras.ops.mean(keras.ops.abs(x)))
        self.constant.update_state(0.25)
        return x


class OwnStep(keras.Model):
    """As in Keras's guides: a step that updates a mean with the loss of its batch."""

    def build(self, shape: Any) -> None:
        self.tracker = keras.metrics.Mean(name="tracked")

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, *_ = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(y - self(x, training=True)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.tracker.update_state(loss)
        return {"tracked": self.tracker.result()}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y, *_ = data
        self.tracker.update_state(keras.ops.mean(keras.ops.square(y - self(x, training=False))))
        return {"tracked": self.tracker.result()}


class OwnMetrics(keras.Model):
    """Overrides `compute_metrics`."""

    def build(self, shape: Any) -> None:
        self.mean = keras.metrics.Mean(name="computed")

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:
        self.mean.update_state(error(y, y_pred))
        return {**super().compute_metrics(x, y, y_pred, sample_weight), "computed": self.mean.result()}


def network(kind: type[keras.Model] = keras.Model, extra: Any = (), last: Any = ()) -> keras.Model:
    inputs = x = keras.Input((5,))
    for layer in (layers.Dense(4, "tanh"), *extra, layers.Dense(1), *last):
        x = layer(x)
    return kind(inputs, x)


def compiled(model: keras.Model, *metrics: Any) -> keras.Model:
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=list(metrics) or None)
    return model


MODELS: dict[str, Callable[[], keras.Model]] = {
    "function": lambda: compiled(network(), error),
    "object": lambda: compiled(network(), keras.metrics.MeanMetricWrapper(error, name="mean"), "mae"),
    "of_keras": lambda: compiled(network(last=[layers.Reshape(())]), "mae"),  # for outputs without a second dim
    "layer": lambda: compiled(network(extra=[Size()])),
    "step": lambda: compiled(network(OwnStep)),
    "compute_metrics": lambda: compiled(network(OwnMetrics), error),
}


@pytest.mark.parametrize(
    ("name", "checked"),
    [
        *((name, True) for name in MODELS if name != "object"),
        pytest.param("object", True, marks=pytest.mark.full),  # Keras makes one of "function"
        pytest.param("function", False, marks=pytest.mark.full),
        ("layer", False),
    ],
)
def test_by_keras_fit(
    float64: None, mirrored2: tfdist.Strategy, name: str, checked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The last batches have one row, of which the second replica has none, or three; no replica computes all rows."""
    y = Y[:, 0] if name == "of_keras" else Y

    def use(model: keras.Model) -> Any:
        valid = (X[:15], y[:15])
        fit = [
            model.fit(X[:size], y[:size], batch_size=7, epochs=2, shuffle=False, verbose=0, validation_data=valid)
            for size in (15, 17)
        ]
        evaluated = model.evaluate(X[:17], y[:17], batch_size=7, return_dict=True, verbose=0)
        batches = [model.train_on_batch(X[:size], y[:size], return_dict=True) for size in (7, 1)]
        return [each.history for each in fit], evaluated, batches, model.test_on_batch(X[:3], y[:3], return_dict=True)

    assert not differences(*both(mirrored2, MODELS[name], use, check_first_batch=checked))
    assert "needs all rows" not in caplog.text


@pytest.mark.parametrize(
    "options", quick([{"accumulate_steps": 3}, {"jit_compile": True}], {"accumulate_steps": 3}), ids=str
)
def test_in_micro_steps_and_compiled(float64: None, mirrored2: tfdist.Strategy, options: dict[str, Any]) -> None:
    """Traced again for the second data, whose batches have another size."""

    def use(model: keras.Model) -> Any:
        return [model.fit(X, Y, batch_size=size, epochs=2, shuffle=False, verbose=0).history for size in (7, 5)]

    assert not differences(*both(mirrored2, lambda: compiled(network(extra=[Size()]), error), use, **options))
