"""Metrics: scalars for each batch, and results of metric objects after passes; as plain Keras on one device, in float64."""

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.keras_fit import models
from tests.keras_fit.comparing import Compare
from tests.keras_fit.models import error
from tests.selection import quick
from tests.step.user_metrics import OneVariable

layers = keras.layers
X = np.random.default_rng(0).normal(size=(19, 5))  # with batches of 6, the last one has a single row
Y = np.random.default_rng(1).normal(size=(19, 1))


class Size(models.Size):
    """Reports the mean size of its inputs, and a value that does not depend on the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.constant = keras.metrics.Mean(name="constant")

    def call(self, x: Any) -> Any:
        self.constant.update_state(0.25)
        return super().call(x)


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
    "name",
    [
        *(name for name in MODELS if name != "object"),
        pytest.param("object", marks=pytest.mark.full),  # Keras makes one of "function"
    ],
)
def test_by_keras_fit(as_one_device: Compare, name: str, caplog: pytest.LogCaptureFixture) -> None:
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

    as_one_device(MODELS[name], use)
    assert "needs all rows" not in caplog.text


class Rows(OneVariable):
    """The number of rows: unlike a mean, it differs if replicas' values are added up twice."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign_add(tf.cast(tf.shape(y_pred)[0], self.value.dtype))


class SignErrors(OneVariable):
    """A metric whose result is a dict, as of one that has a score for each class."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign_add(tf.reduce_sum(tf.cast((y_true > 0) != (y_pred > 0), self.value.dtype)))

    def result(self) -> Any:
        return {"errors": self.value + 0, "squared": self.value**2}


class Scaled(keras.Model):
    """A model with its own step, whose results are computed from a metric, so that replicas have all rows."""

    def train_step(self, data: Any) -> dict[str, Any]:
        return {"twice": 2 * super().train_step(data)["mae"]}


def dense(kind: type[keras.Model] = keras.Model) -> keras.Model:
    inputs = keras.Input((5,))
    model = kind(inputs, keras.layers.Dense(1)(keras.layers.Dense(4, "tanh")(inputs)))
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[keras.metrics.MeanAbsoluteError(name="mae"), Rows()])
    return model


def results(model: keras.Model) -> Any:
    found = {metric.name: metric.result() for metric in model.metrics}
    found |= found.pop("compile_metrics")
    return {name: float(value) for name, value in found.items()}


class Noted(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.found.append((epoch, results(self.model), dict(logs or {})))


def data(counted: bool) -> tf.data.Dataset:
    batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
    return batches if counted else batches.filter(lambda x, y: True)  # its length is unknown until a pass has ended


KINDS = {"model": keras.Model, "scaled": Scaled}
COUNTED, VALIDATED = ("counted", "uncounted"), ("validated", "alone")
PAIRS = (  # any two of the three are together in one
    ("model", "counted", "validated"),
    ("model", "uncounted", "alone"),
    ("scaled", "counted", "alone"),
    ("scaled", "uncounted", "validated"),
)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")  # as in Keras
@pytest.mark.parametrize("pair", quick(itertools.product(KINDS, COUNTED, VALIDATED), *PAIRS), ids="-".join)
def test_at_the_ends_of_epochs_fit_and_evaluate(as_one_device: Compare, pair: tuple[str, str, str]) -> None:
    kind, counted, validated = KINDS[pair[0]], pair[1] == "counted", pair[2] == "validated"

    def use(model: keras.Model) -> Any:
        noted, other = Noted(), (X[:7], Y[:7]) if validated else None
        history = model.fit(data(counted), epochs=3, shuffle=False, verbose=0, validation_data=other, callbacks=[noted])
        after_fit = results(model)
        evaluated = model.evaluate(X, Y, batch_size=6, verbose=0)
        found = history.history, noted.found, after_fit, evaluated, results(model)
        model.reset_metrics()
        return *found, results(model)

    as_one_device(lambda: dense(kind), use)


def test_compiled_again_and_on_batches(as_one_device: Compare) -> None:
    def use(model: keras.Model) -> Any:
        metric = keras.metrics.MeanAbsoluteError()
        found = []
        for _ in range(2):
            metric.reset_state()  # Keras adds to what a metric holds when it is compiled again
            model.compile("sgd", "mse", metrics=[metric])
            history = model.fit(X, Y, batch_size=6, steps_per_epoch=2, epochs=2, verbose=0).history
            found.append((history, float(metric.result()), model.evaluate(X, Y, verbose=0), float(metric.result())))
        model.reset_metrics()
        found.append((model.train_on_batch(X[:6], Y[:6]), float(metric.result())))
        return found

    as_one_device(dense, use)


@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_whose_result_is_a_dict(as_one_device: Compare, kind: str) -> None:
    def use(model: keras.Model) -> Any:
        model.compile("sgd", "mse", metrics=["mae", SignErrors()])
        history = model.fit(
            X, Y, batch_size=6, epochs=2, shuffle=False, verbose=0, validation_data=(X[:7], Y[:7])
        ).history
        batch = model.train_on_batch(X[:6], Y[:6], return_dict=True)
        return history, batch, model.evaluate(X, Y, batch_size=6, verbose=0, return_dict=True)

    as_one_device(lambda: dense(KINDS[kind]), use)
