"""Custom losses give the results of one device: replicas share means and sums over rows; others are computed by each."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.adding_loss import AddsLoss
from tests.keras_fit.comparing import Compare, both, differences
from tests.keras_fit.rows import X, Y, fitted, functional, sequential
from tests.selection import quick

ops = keras.ops


def momentum(rate: float = 0.1) -> keras.Optimizer:
    return keras.optimizers.SGD(rate, momentum=0.9)


def added(loss: Callable[[Any], Any]) -> Callable[[], keras.Model]:
    return lambda: sequential(AddsLoss(loss), optimizer=momentum())


def compiled(loss: Callable[[Any, Any], Any]) -> Callable[[], keras.Model]:
    return lambda: sequential(optimizer=momentum(), loss=loss)


def stepping(loss: Callable[[Any, Any], Any]) -> Callable[[], keras.Model]:
    def train_step(self: Any, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            value = loss(y, self(x, training=True))
        gradients = tape.gradient(value, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": tf.reduce_mean(value)}

    return lambda: functional(train_step, optimizer=momentum(0.01))


def masked_mean(y: Any, x: Any) -> Any:
    mask = tf.cast(y > 0, x.dtype)
    return tf.reduce_sum(mask * (y - x) ** 2) / (tf.reduce_sum(mask) + 1e-6)


def by_numpy(y: Any, x: Any) -> Any:
    weights = tf.numpy_function(lambda y: np.abs(y[:, 0] - np.median(y)), [y], y.dtype)
    weights.set_shape([None])
    return tf.reduce_mean(weights[:, None] * (y - x) ** 2)


def recurrent() -> keras.Model:
    layers = [keras.Input((5,)), keras.layers.Reshape((5, 1)), keras.layers.LSTM(3)]
    model = keras.Sequential([*layers, keras.layers.Dense(3)])
    model.compile(momentum(), masked_mean, metrics=["mae"])
    return model


# All ways in which a loss may depend on rows; docs/guides/keras_fit.md describes what they mean on replicas.
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
# More losses are programs of tests/row_semantics/written.tsv.
OF_ALL_ROWS: dict[str, Callable[[], keras.Model]] = {
    "add_loss of a sum": added(lambda x: 0.1 * ops.sum(x**2)),
    "a root of a mean": compiled(lambda y, x: ops.sqrt(ops.mean((y - x) ** 2))),
    "a step over pairs": stepping(lambda y, x: tf.reduce_mean(tf.matmul(x, x, transpose_b=True) ** 2)),
    "a function of NumPy": compiled(by_numpy),
    "a ratio in a recurrent network": recurrent,
    "a ratio with dropout": lambda: sequential(keras.layers.Dropout(0.0), loss=masked_mean),
    "a ratio with batch normalization": lambda: sequential(
        keras.layers.BatchNormalization(synchronized=True), loss=masked_mean
    ),
}


def _regularized() -> keras.Model:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, activity_regularizer="l2")])
    model.compile(momentum(), "mse")
    return model


@pytest.mark.parametrize(
    "name",
    quick(
        RIGHT,
        "add_loss of a mean",
        "an activity regularizer",
        "a loss function that is a mean",
        "a step with a loss object",
        "a step with a sum",
    ),
)
def test_it_gives_one_device_s_numbers(name: str, as_one_device: Compare) -> None:
    as_one_device(RIGHT[name], fitted)


QUICK = ("add_loss of a sum", "a root of a mean", "a step over pairs", "a ratio in a recurrent network")


@pytest.mark.parametrize("name", quick(OF_ALL_ROWS, *QUICK, "a function of NumPy"))
def test_what_needs_all_rows_is_partitioned(
    name: str, as_one_device: Compare, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tfdist")

    def use(model: keras.Model) -> Any:
        three = model.fit(X[:3], Y[:3], batch_size=3, verbose=0).history  # of which a replica has one
        return fitted(model), three, model.evaluate(X[:7], Y[:7], verbose=0), model.predict(X[:7], verbose=0)

    def make() -> keras.Model:
        model = OF_ALL_ROWS[name]()
        if type(model).train_step is not keras.Model.train_step:
            model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")  # evaluate needs a loss
        return model

    as_one_device(make, use)
    [text] = [message for message in caplog.messages if message.startswith("train_step of")]
    assert "needs all rows of a batch" in text
    assert "Besides gradients, replicas communicate" in text


def contrastive(of_own_rows: bool) -> Callable[[], keras.Model]:
    """Returns a model whose loss compares each row's output with those of all rows of the batch."""

    class Contrastive(keras.Model):
        def train_step(self, data: Any) -> Any:
            x, _ = data
            with tf.GradientTape() as tape:
                outputs = self(x, training=True)
                everyones = tfdist.gather_rows(outputs)
                similar = tf.matmul(outputs if of_own_rows else everyones, everyones, transpose_b=True)
                loss = tf.reduce_mean(tf.reduce_logsumexp(similar, axis=1))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    def make() -> keras.Model:
        inputs = keras.Input((5,))
        hidden = keras.layers.BatchNormalization()(keras.layers.Dense(4)(inputs))
        model = Contrastive(inputs, keras.layers.Dense(3)(hidden))
        model.compile(keras.optimizers.SGD(0.1))
        return model

    return make


@pytest.mark.parametrize("of_own_rows", quick([False, True], True))
def test_rows_that_are_gathered_are_compared_and_the_work_is_shared(
    of_own_rows: bool, as_one_device: Compare, caplog: pytest.LogCaptureFixture
) -> None:
    """The last batch has 3 rows on one replica and 2 on the other."""

    def use(model: keras.Model) -> Any:
        return model.fit(X[:21], Y[:21], batch_size=8, epochs=2, verbose=0).history

    as_one_device(contrastive(of_own_rows), use, batch_norm="synchronized")
    assert not any("needs all rows" in message for message in caplog.messages)


def test_batch_normalization_is_no_reason(float64: None, mirrored2: tfdist.Strategy) -> None:
    """Its local statistics have the same distribution; synchronized ones equal those of one device."""

    def make() -> keras.Model:
        added = AddsLoss(lambda x: ops.mean(x**4))
        return sequential(keras.layers.BatchNormalization(), added, optimizer="sgd")

    assert differences(*both(mirrored2, make, fitted))
    assert not differences(*both(mirrored2, make, fitted, batch_norm="synchronized"))
