"""Models that are cut in tests, each with a batch of inputs."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.adding_loss import AddsLoss
from tfdist import models

Made = tuple[keras.Model, Any]
ROWS, LENGTH, VOCABULARY, WIDTH = 3, 6, 11, 8
TRANSFORMER = "transformer(layers=2, width=8, heads=2)"
EXPERTS = "transformer(layers=2, width=8, heads=2, experts=2, capacity_factor=4)"
layers, ops = keras.layers, keras.ops


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(7).standard_normal((ROWS, *shape))


def tokens() -> np.ndarray:
    found = np.random.default_rng(8).integers(1, VOCABULARY, (ROWS, LENGTH)).astype("int32")
    found[:, 4:] = 0
    return found


def tied() -> Made:
    """Tied embeddings: the table is used in the first and in the last stage."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    table = layers.ReversibleEmbedding(VOCABULARY, WIDTH, mask_zero=True, name="table")
    x = table(inputs)
    for i in range(3):
        y = layers.LayerNormalization(name=f"norm_{i}")(x)
        y = layers.MultiHeadAttention(2, 4, name=f"attention_{i}")(y, y, use_causal_mask=True)
        x = layers.Add(name=f"block_{i}")([x, y])
    return keras.Model(inputs, table(x, reverse=True)), tokens()


def untied() -> Made:
    """A layer that is called twice, with another variable in each call."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    table = layers.ReversibleEmbedding(VOCABULARY, WIDTH, tie_weights=False, name="table")
    x = layers.Dense(WIDTH, name="dense")(table(inputs))
    return keras.Model(inputs, table(layers.Dense(WIDTH, name="last")(x), reverse=True)), tokens()


def skip() -> Made:
    """A skip connection over two cuts."""
    inputs = keras.Input((6,))
    early = layers.Dense(8, activation="relu", name="early")(inputs)
    x = layers.Dense(8, activation="tanh", name="second")(early)
    x = layers.Dense(8, activation="tanh", name="third")(x)
    x = layers.Dense(8, activation="tanh", name="fourth")(x)
    return keras.Model(inputs, layers.Dense(2, name="last")(layers.Concatenate()([x, early, inputs]))), numbers(6)


def masked() -> Made:
    """A mask that later layers use, and that reaches the output."""
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True, name="embedding")(inputs)
    x = layers.LSTM(WIDTH, return_sequences=True, name="first")(x)
    x = layers.Dense(WIDTH, activation="relu", name="dense")(x)
    x = layers.MultiHeadAttention(2, 4, name="attention")(x, x)
    x = layers.LSTM(WIDTH, return_sequences=True, name="second")(x)
    return keras.Model(inputs, layers.Dense(2, name="last")(x)), tokens()


def twice() -> Made:
    """A layer without state that is called twice."""
    inputs = keras.Input((8,))
    dense = layers.Dense(8, activation="tanh", name="dense")
    x = layers.Dense(8, name="between")(dense(inputs))
    return keras.Model(inputs, layers.Dense(3, name="last")(dense(x))), numbers(8)


class Halves(layers.Layer):
    """A layer with several outputs, one of which are integers."""

    def call(self, x: Any) -> Any:
        return {"positive": ops.relu(x), "sign": ops.cast(x > 0, "int32"), "rest": (x - 1.0, [x * 2.0])}


def several() -> Made:
    """Layers with several outputs."""
    inputs = keras.Input((LENGTH, 4))
    x, state, carry = layers.LSTM(WIDTH, return_sequences=True, return_state=True, name="encoder")(inputs)
    parts = Halves(name="halves")(x)
    y = layers.LSTM(WIDTH, name="decoder")(parts["rest"][0], initial_state=[state, carry])
    flat = layers.Flatten(name="flat")(parts["positive"] * ops.cast(parts["sign"], x.dtype) + parts["rest"][1][0])
    return keras.Model(inputs, layers.Dense(2, name="last")(layers.Concatenate()([y, flat]))), numbers(LENGTH, 4)


def many() -> Made:
    """Several inputs and outputs, of which one is made early and another is an input."""
    left, right = keras.Input((4,), name="left"), keras.Input((), dtype="int32", name="right")
    x = layers.Dense(8, activation="relu", name="first")(left)
    aside = layers.Dense(3, activation="softmax", name="aside")(x)
    x = layers.Dense(8, activation="relu", name="second")(x)
    x = layers.Concatenate(name="both")([x, layers.Embedding(5, 4, name="embedding")(right)])
    x = layers.Dense(8, activation="relu", name="third")(x)
    outputs = {"aside": aside, "given": left, "main": layers.Dense(2, name="main")(x)}
    inputs = {"left": left, "right": right}
    return keras.Model(inputs, outputs), {"left": numbers(4), "right": np.array([1, 4, 2])}


def nested() -> Made:
    """A model whose body is one nested model, with another inside."""
    head = keras.Sequential([keras.Input((8,)), layers.Dense(6, name="a"), layers.Dense(5, name="b")], name="head")
    inside = keras.Input((8,), name="inside")
    x = layers.Dense(8, activation="relu", name="first")(inside)
    body = keras.Model(inside, {"x": head(layers.BatchNormalization(name="norm")(x)), "early": x}, name="body")
    inputs = keras.Input((8,))
    found = body(inputs)
    return keras.Model(inputs, layers.Concatenate(name="joined")([found["x"], found["early"]])), numbers(8)


def nested_twice() -> Made:
    """A nested model that is called twice, and a mask from outside that reaches its layers."""
    inside = keras.Input((LENGTH, WIDTH))
    x = layers.LSTM(WIDTH, return_sequences=True, name="recurrent")(inside)
    block = keras.Model(inside, layers.Dense(WIDTH, name="dense")(x), name="block")
    inputs = keras.Input((LENGTH,), dtype="int32")
    embedded = layers.Embedding(VOCABULARY, WIDTH, mask_zero=True, name="embedding")(inputs)
    return keras.Model(inputs, layers.LSTM(3, name="last")(block(block(embedded)))), tokens()


def operations() -> Made:
    """Operators and functions of `keras.ops` between layers, and a Lambda."""
    inputs = keras.Input((4, 4))
    x = layers.Dense(4, name="dense")(inputs + 1.0)
    x = ops.concatenate([ops.relu(x), 2.0 * inputs[:, :, :2]], axis=-1)
    x = ops.matmul(ops.transpose(x, (0, 2, 1)), x) / 3.0
    x = layers.Lambda(lambda t: tf.reduce_sum(t, axis=1), output_shape=(6,), name="sum")(x)
    return keras.Model(inputs, ops.sin(x) ** 2), numbers(4, 4)


def regularized() -> Made:
    """Losses of layers and of weights; one layer adds its loss in two calls."""
    inputs = keras.Input((4,))
    l2 = keras.regularizers.L2(0.1)
    dense = layers.Dense(4, kernel_regularizer=l2, activity_regularizer=l2, name="dense")
    x = AddsLoss(name="penalty")(layers.Dense(4, bias_regularizer=l2, name="between")(dense(inputs)))
    return keras.Model(inputs, layers.Dense(2, kernel_regularizer=l2, name="last")(dense(x))), numbers(4)


def sequential() -> Made:
    """A sequential model, which converts its inputs; one of its layers is built by being traced."""
    one, *others = (layers.Dense(6, activation="relu") for _ in range(4))
    return keras.Sequential([keras.Input((6,)), layers.Pipeline([one]), *others]), numbers(6).astype("float32")


def branching() -> Made:
    """Layers that read their weights in a branch first."""
    spectral = [layers.SpectralNormalization(layers.Dense(6, "tanh")) for _ in range(3)]
    return keras.Sequential([keras.Input((6,)), *spectral, layers.Dense(2)]), numbers(6)


OF_TFDIST = {
    "mlp": lambda: (models.build("mlp(hidden=(16, 12, 8))", (4, 3), 5), numbers(4, 3)),
    "cnn": lambda: (models.build("cnn(filters=(4, 6))", (8, 8, 3), 5), numbers(8, 8, 3)),
    "transformer": lambda: (models.build(TRANSFORMER, (LENGTH,), VOCABULARY), tokens()),
    "experts": lambda: (models.build(EXPERTS, (LENGTH,), VOCABULARY), tokens()),
}
OWN = (tied, untied, skip, masked, twice, several, many, nested, nested_twice, operations, regularized, sequential)
MODELS: dict[str, Callable[[], Made]] = {**OF_TFDIST, **{make.__name__: make for make in (*OWN, branching)}}


def build(name: str) -> Made:
    """Builds one of the models with the same weights each time."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    return MODELS[name]()
