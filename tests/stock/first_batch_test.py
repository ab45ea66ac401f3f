"""Losses of one's own: means and sums over rows give one device's numbers on replicas, and anything else is refused."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.stock.comparing import both, differences
from tfdist.errors import InputError

ops = keras.ops
X = np.random.default_rng(0).normal(size=(22, 5))
Y = np.random.default_rng(1).normal(size=(22, 3))


class LossInALayer(keras.layers.Layer):
    """Adds a loss that a function makes of its inputs."""

    def __init__(self, loss: Callable[[Any], Any]) -> None:
        super().__init__()
        self.loss = loss

    def call(self, x: Any) -> Any:
        self.add_loss(self.loss(x))
        return x


def added(loss: Callable[[Any], Any]) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), LossInALayer(loss)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        return model

    return make


def compiled(loss: Callable[[Any, Any], Any]) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
        return model

    return make


def stepping(loss: Callable[[Any, Any], Any]) -> Callable[[], keras.Model]:
    class Stepping(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                value = loss(y, self(x, training=True))
            gradients = tape.gradient(value, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": tf.reduce_mean(value)}

    def make() -> keras.Model:
        inputs = keras.Input((5,))
        model = Stepping(inputs, keras.layers.Dense(3)(inputs))
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9))
        return model

    return make


def fitted(model: keras.Model) -> Any:
    return model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history


# Each way in which rows reach a loss: what it means on replicas is said in docs/keras_fit.md.
RIGHT: dict[str, Callable[[], keras.Model]] = {
    "add_loss of a mean": added(lambda x: 0.1 * ops.mean(x**2)),
    "add_loss of a loss object": added(lambda x: keras.losses.MeanSquaredError()(ops.zeros_like(x), x)),
    "add_loss of a loss function": added(lambda x: ops.mean(keras.losses.mean_squared_error(ops.zeros_like(x), x))),
    "an activity regularizer": lambda: _regularized(),
    "a loss function for each row": compiled(lambda y, x: ops.mean((y - x) ** 2, axis=-1)),
    "a loss function that is a mean": compiled(lambda y, x: ops.mean((y - x) ** 2)),
    "a step with a mean": stepping(lambda y, x: tf.reduce_mean((y - x) ** 2)),
    "a step with a loss object": stepping(keras.losses.MeanSquaredError()),
    "a step with a sum": stepping(lambda y, x: 0.1 * tf.reduce_sum((y - x) ** 2)),
    "a step with a value for each row": stepping(lambda y, x: keras.losses.mean_squared_error(y, x)),
}
WRONG: dict[str, Callable[[], keras.Model]] = {
    "add_loss of a sum": added(lambda x: 0.1 * ops.sum(x**2)),
    "add_loss over pairs": added(lambda x: 0.1 * ops.mean(ops.matmul(x, ops.transpose(x)) ** 2)),
    "a root of a mean": compiled(lambda y, x: ops.sqrt(ops.mean((y - x) ** 2))),
    "a step over pairs": stepping(lambda y, x: tf.reduce_mean(tf.matmul(x, x, transpose_b=True) ** 2)),
    "a step with a sum and a mean": stepping(lambda y, x: tf.reduce_sum(y - x) ** 2 + tf.reduce_mean(x)),
    "a variance over the batch": added(lambda x: ops.mean(ops.var(x, axis=0))),
}


def _regularized() -> keras.Model:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, activity_regularizer="l2")])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


@pytest.mark.parametrize("name", RIGHT)
def test_it_gives_one_device_s_numbers(name: str, float64: None, mirrored2: tfdist.Strategy) -> None:
    assert not differences(*both(mirrored2, RIGHT[name], fitted))


@pytest.mark.parametrize("name", WRONG)
def test_it_is_refused_before_a_step_counts(name: str, float64: None, mirrored2: tfdist.Strategy) -> None:
    keras.utils.set_random_seed(1)
    model = WRONG[name]()
    before = model.get_weights()
    tfdist.distribute(model, mirrored2)
    with pytest.raises(InputError, match="means or sums over rows.* on one device.*--check_first_batch=false"):
        fitted(model)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_it_trains_if_the_check_is_switched_off(mirrored2: tfdist.Strategy) -> None:
    model = tfdist.distribute(WRONG["a variance over the batch"](), mirrored2, check_first_batch=False)
    assert len(fitted(model)["loss"]) == 2


def test_a_metric_that_compares_rows_with_each_other_is_refused(mirrored2: tfdist.Strategy) -> None:
    def pairs(y: Any, x: Any) -> Any:
        return ops.mean(ops.abs(ops.expand_dims(x, 0) - ops.expand_dims(x, 1)))

    model = compiled(lambda y, x: ops.mean((y - x) ** 2, axis=-1))()
    model.compile("sgd", "mse", metrics=[pairs])
    with pytest.raises(InputError, match='the metric "pairs"'):
        fitted(tfdist.distribute(model, mirrored2))


def test_batch_normalization_is_no_reason(float64: None, mirrored2: tfdist.Strategy) -> None:
    """Its local statistics follow the same law; synchronized they are one device's."""

    def make() -> keras.Model:
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), LossInALayer(lambda x: ops.mean(x**4))]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile("sgd", "mse")
        return model

    assert differences(*both(mirrored2, make, fitted))
    assert not differences(*both(mirrored2, make, fitted, batch_norm="synchronized"))
