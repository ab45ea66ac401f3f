"""Variables of TensorFlow, besides those of Keras, in models, layers and metrics; replicas of a process share them."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.keras_fit.comparing import Compare
from tfdist.errors import InputError

X = np.random.default_rng(0).normal(size=(12, 5))
Y = np.random.default_rng(1).normal(size=(12, 1))


class CountingRows(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="rows")
        self.count = tf.Variable(0.0)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.count.assign_add(tf.cast(tf.shape(y_pred)[0], self.count.dtype))

    def result(self) -> Any:
        return self.count + 0


class CountingCalls(keras.layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.counts = [tf.Variable(0.0)]

    def call(self, x: Any) -> Any:
        self.counts[0].assign_add(1.0)
        return x + 0 * tf.cast(self.counts[0], x.dtype)


class CountingSteps(keras.Model):
    """Has a variable by which it scales its losses, and may count steps with it."""

    def __init__(self, *args: Any, counts: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale, self.counts = tf.Variable(1.0), counts

    def train_step(self, data: Any) -> dict[str, Any]:
        if self.counts:
            self.scale.assign_add(1.0)
        return super().train_step(data)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * tf.cast(self.scale, loss.dtype)


def compiled(*layers: keras.Layer, kind: Callable[..., keras.Model] = keras.Model, metrics: Any = None) -> keras.Model:
    outputs = inputs = keras.Input((5,))
    for layer in (*layers, keras.layers.Dense(1)):
        outputs = layer(outputs)
    model = kind(inputs, outputs)
    model.compile("sgd", "mse", metrics=metrics)
    return model


@pytest.mark.parametrize(
    "make",
    [lambda: compiled(CountingCalls()), lambda: compiled(kind=CountingSteps)],
    ids=["layer", "model"],
)
def test_one_without_copies_is_not_assigned(make: Callable[[], keras.Model], mirrored2: tfdist.Strategy) -> None:
    """As in a program without a scope: it would change once for each replica."""
    model = tfdist.distribute(make(), mirrored2)
    with pytest.raises(InputError, match="must be a Keras variable.*a tf.Variable of .* which 2 replicas would"):
        model.fit(X, Y, batch_size=6, verbose=0)


def test_a_metric_has_none(mirrored2: tfdist.Strategy) -> None:
    model = tfdist.distribute(compiled(metrics=[CountingRows()]), mirrored2)
    with pytest.raises(
        InputError, match="Received: rows with a tf.Variable, count. Create the variable with add_variable"
    ):
        model.evaluate(X, Y, batch_size=6, verbose=0)


def test_a_callback_may_assign_one(as_one_device: Compare) -> None:
    class Schedule(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.scale.assign(0.5 + batch)

    def make() -> keras.Model:
        return compiled(kind=lambda *args: CountingSteps(*args, counts=False))

    def use(model: keras.Model) -> Any:
        return model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[Schedule()]).history

    as_one_device(make, use)
