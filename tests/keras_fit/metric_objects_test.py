"""Results of the user's own metric objects after passes over data; on two replicas, compared with plain Keras in float64."""

import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.keras_fit.comparing import both, differences
from tests.selection import quick

X = np.random.default_rng(0).normal(size=(19, 5))  # with batches of 6, the last one has a single row
Y = np.random.default_rng(1).normal(size=(19, 1))


class Rows(keras.metrics.Metric):
    """The number of rows: unlike a mean, it differs if replicas' values are added up twice."""

    def __init__(self) -> None:
        super().__init__(name="rows")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(tf.cast(tf.shape(y_pred)[0], self.count.dtype))

    def result(self) -> Any:
        return self.count + 0


class SignErrors(Rows):
    """A metric whose result is a dict, as of one that has a score for each class."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(tf.reduce_sum(tf.cast((y_true > 0) != (y_pred > 0), self.count.dtype)))

    def result(self) -> Any:
        return {"errors": self.count + 0, "squared": self.count**2}


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
def test_at_the_ends_of_epochs_fit_and_evaluate(
    float64: None, mirrored2: tfdist.Strategy, pair: tuple[str, str, str]
) -> None:
    kind, counted, validated = KINDS[pair[0]], pair[1] == "counted", pair[2] == "validated"

    def use(model: keras.Model) -> Any:
        noted, other = Noted(), (X[:7], Y[:7]) if validated else None
        history = model.fit(data(counted), epochs=3, shuffle=False, verbose=0, validation_data=other, callbacks=[noted])
        after_fit = results(model)
        evaluated = model.evaluate(X, Y, batch_size=6, verbose=0)
        found = history.history, noted.found, after_fit, evaluated, results(model)
        model.reset_metrics()
        return *found, results(model)

    assert not differences(*both(mirrored2, lambda: dense(kind), use))


def test_compiled_again_and_on_batches(float64: None, mirrored2: tfdist.Strategy) -> None:
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

    assert not differences(*both(mirrored2, dense, use))


@pytest.mark.parametrize("kind", KINDS)
def test_a_metric_whose_result_is_a_dict(float64: None, mirrored2: tfdist.Strategy, kind: str) -> None:
    def use(model: keras.Model) -> Any:
        model.compile("sgd", "mse", metrics=["mae", SignErrors()])
        history = model.fit(
            X, Y, batch_size=6, epochs=2, shuffle=False, verbose=0, validation_data=(X[:7], Y[:7])
        ).history
        batch = model.train_on_batch(X[:6], Y[:6], return_dict=True)
        return history, batch, model.evaluate(X, Y, batch_size=6, verbose=0, return_dict=True)

    assert not differences(*both(mirrored2, lambda: dense(KINDS[kind]), use))
