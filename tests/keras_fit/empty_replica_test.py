"""The last batch has one row, so that one of two replicas has none: it computes a row that does not count.

In float32, for which TensorFlow uses oneDNN.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.adding_loss import AddsLoss, mean_square
from tests.keras_fit.comparing import both
from tests.selection import quick

layers = keras.layers
ROWS, BATCH = 9, 4
NUMBERS = np.random.default_rng(0)
SERIES, IMAGES = (ROWS, 12, 3), (ROWS, 9, 8, 3)


class Contrast(layers.Layer):
    """Compares each row with the mean of the whole batch."""

    def call(self, x: Any) -> Any:
        return x - tf.reduce_mean(tfdist.gather_rows(x), axis=0)


class Communicates(layers.Layer):
    """Computes with sums and rows of all replicas."""

    def call(self, x: Any) -> Any:
        collectives, fixed = tfdist.collectives.current(), tf.stop_gradient(x)
        sums = [tf.reduce_sum(fixed, axis=0), tf.cast(tf.shape(x)[0], x.dtype)]
        total, rows = collectives.all_reduce(sums, name="sums")
        [highest] = collectives.all_reduce([tf.reduce_max(fixed, axis=0)], "max", name="highest")
        [whole] = collectives.all_gather([fixed], name="whole")
        return x - total / (1 + rows) + 0.1 * tf.reduce_sum(whole, axis=0) * highest


class HasRows(layers.Layer):
    def call(self, x: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_positive(tf.shape(x)[0])]):
            return tf.identity(x)


class NotFinite(layers.Layer):
    """Gives NaN for a single row on the second replica, which does not count."""

    def call(self, x: Any) -> Any:
        is_second = tf.equal(tfdist.collectives.current().rank, 1)
        return x * tf.where(is_second & tf.equal(tf.shape(x)[0], 1), float("nan"), 1.0)


class Error(keras.metrics.Metric):
    """A mean over rows that takes no weights, as users write it."""

    def __init__(self) -> None:
        super().__init__(name="error")
        self.total, self.rows = (self.add_variable((), "zeros", name=name) for name in ("total", "rows"))

    def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.reduce_sum(tf.abs(y - outputs)))
        self.rows.assign_add(tf.cast(tf.shape(y)[0], tf.float32))

    def result(self) -> Any:
        return self.total / self.rows


LAYERS: dict[str, tuple[tuple[int, ...], Callable[[], list[layers.Layer]]]] = {
    "conv1d_dilated": (SERIES, lambda: [layers.Conv1D(4, 2, dilation_rate=4, padding="causal")]),
    "conv2d": (IMAGES, lambda: [layers.Conv2D(4, 3, strides=2), layers.ReLU()]),
    "conv2d_dilated": (IMAGES, lambda: [layers.Conv2D(4, 3, dilation_rate=2)]),
    "depthwise": (IMAGES, lambda: [layers.DepthwiseConv2D(3)]),
    "max_pool": (IMAGES, lambda: [layers.Conv2D(4, 3), layers.MaxPooling2D(2)]),
    "reflected": (IMAGES, lambda: [layers.Lambda(lambda x: tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]], "REFLECT"))]),
    "recurrent": (SERIES, lambda: [layers.Masking(), layers.Bidirectional(layers.LSTM(4))]),
    "synchronized": (IMAGES, lambda: [layers.Conv2D(4, 3), tfdist.layers.SyncBatchNormalization()]),
    "gathered": (SERIES, lambda: [layers.Conv1D(4, 3), Contrast()]),
    "communicates": (SERIES, lambda: [layers.Conv1D(4, 3), Communicates()]),
    "not_finite": (
        SERIES,
        lambda: [layers.Conv1D(4, 3), NotFinite(), tfdist.layers.SyncBatchNormalization(), Contrast(), NotFinite()],
    ),
    "penalized": (
        SERIES,
        lambda: [layers.Conv1D(4, 3, activity_regularizer="l2"), AddsLoss(lambda x: 0.1 * mean_square(x + 3))],
    ),
}


class Own(keras.Model):
    """A custom step that calls a part of the model."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            hidden = self.layers[2](self.layers[1](x))
            outputs = hidden
            for layer in self.layers[3:]:
                outputs = layer(outputs)
            loss = keras.ops.mean(keras.ops.square(y - outputs)) + keras.ops.mean(keras.ops.square(hidden))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def network(name: str, kind: type[keras.Model] = keras.Model) -> keras.Model:
    shape, make = LAYERS[name]
    inputs = x = keras.Input(shape[1:])
    for layer in [HasRows(), *make()]:
        x = layer(x)
    model = kind(inputs, layers.Dense(2)(layers.Flatten()(x)))
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae", Error()] if kind is keras.Model else None)
    return model


def used(shape: tuple[int, ...], y: Any = None) -> Callable[[keras.Model], Any]:
    x = NUMBERS.normal(size=shape).astype("float32")
    y = NUMBERS.normal(size=(ROWS, 2)).astype("float32") if y is None else y
    x[:, 1] = 0  # masked, where there is a mask

    def use(model: keras.Model) -> Any:
        history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        return history, model.evaluate(x, y, batch_size=BATCH, verbose=0), model.predict(x, BATCH, verbose=0)

    return use


def assert_same(ours: Any, plain: Any) -> None:
    for a, b in zip(keras.tree.flatten(ours), keras.tree.flatten(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("name", quick(LAYERS, "conv1d_dilated", "conv2d", "max_pool", "gathered", "synchronized"))
def test_it_trains_evaluates_and_predicts_as_one_device(name: str, mirrored2: tfdist.Strategy) -> None:
    assert_same(*both(mirrored2, lambda: network(name), used(LAYERS[name][0])))


def test_ctc(mirrored2: tfdist.Strategy) -> None:
    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((12, 3)), layers.Dense(5)])
        model.compile("sgd", keras.losses.CTC())
        return model

    assert_same(*both(mirrored2, make, used(SERIES, NUMBERS.integers(1, 4, (ROWS, 4)))))


@pytest.mark.parametrize("name", quick(["conv1d_dilated", "conv2d_dilated", "depthwise", "not_finite"], "depthwise"))
def test_so_do_custom_steps(name: str, mirrored2: tfdist.Strategy) -> None:
    assert_same(*both(mirrored2, lambda: network(name, Own), used(LAYERS[name][0])))


def test_in_micro_steps(mirrored2: tfdist.Strategy) -> None:
    assert_same(*both(mirrored2, lambda: network("conv1d_dilated"), used(SERIES), accumulate_steps=2))


def test_compiled_with_xla(mirrored2: tfdist.Strategy) -> None:
    assert_same(*both(mirrored2, lambda: network("conv1d_dilated"), used(SERIES), jit_compile=True))
