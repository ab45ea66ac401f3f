"""Random numbers in a model's own code: each replica draws different ones, and a comparison draws none."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import keras_internals

DRAWS: dict[str, Callable[[], Any]] = {
    "tf normal": lambda: tf.random.normal((4, 50)),
    "tf uniform": lambda: tf.random.uniform((4, 50), -1.0, 1.0),
    "tf uniform int": lambda: tf.random.uniform((4, 50), 0, 100, dtype=tf.int32),
    "tf truncated_normal": lambda: tf.random.truncated_normal((4, 50)),
    "tf gamma": lambda: tf.random.gamma((4, 50), 2.0),
    "tf poisson": lambda: tf.random.poisson((4, 50), 9.0),
    "tf categorical": lambda: tf.random.categorical(tf.zeros((4, 50)), 50),
    "tf shuffle": lambda: tf.random.shuffle(tf.range(200)),
    "tf dropout": lambda: tf.nn.dropout(tf.ones((4, 50)), 0.5),
    "keras normal": lambda: keras.random.normal((4, 50)),
    "keras uniform": lambda: keras.random.uniform((4, 50), seed=7),
    "keras randint": lambda: keras.random.randint((4, 50), 0, 100),
    "keras dropout": lambda: keras.random.dropout(tf.ones((4, 50)), 0.5),
    "keras generator": lambda: keras.random.normal((4, 50), seed=keras.random.SeedGenerator(3)),
}


def drawn(name: str, key: list[int]) -> np.ndarray:
    with keras_internals.random_key_scope(tf.constant(key, tf.int32), frozenset()):
        return np.asarray(DRAWS[name]()).astype("float64").ravel()


@pytest.mark.parametrize("name", DRAWS)
def test_a_key_says_what_is_drawn(name: str) -> None:
    first, again, other = drawn(name, [1, 2]), drawn(name, [1, 2]), drawn(name, [1, 3])
    np.testing.assert_array_equal(first, again)
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.3  # 200 numbers: four standard deviations


def test_draws_of_one_key_differ() -> None:
    with keras_internals.random_key_scope(tf.constant([1, 2]), frozenset()):
        first, second = tf.random.normal((200,)), tf.random.normal((200,))
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.3


def test_outside_nothing_has_changed() -> None:
    with keras_internals.random_key_scope(tf.constant([1, 2]), frozenset()):
        pass
    tf.random.set_seed(5)
    first = tf.random.normal((3,))
    tf.random.set_seed(5)
    np.testing.assert_array_equal(first, tf.random.normal((3,)))
    assert not np.array_equal(tf.random.normal((3,)), tf.random.normal((3,)))


class Noisy(keras.Model):
    """Stores the numbers that each replica has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(1)
        own = {"aggregation": "none", "synchronization": "on_read"}  # one value per replica
        self.noise = keras.Variable(np.zeros(100, "int32"), trainable=False, **own)  # floats are averaged at the end

    def call(self, x: Any) -> Any:
        return self.layer(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.noise.assign(tf.cast(1000.0 * tf.random.normal((100,)), tf.int32))
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.layer.trainable_variables), self.layer.trainable_variables)
        return {"loss": loss}


def test_replicas_with_one_seed_draw_other_numbers(mirrored2: tfdist.Strategy) -> None:
    model = Noisy()
    model.compile("sgd")
    tfdist.distribute(model, mirrored2)
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
    one, other = (np.asarray(value) for value in mirrored2.local(model.noise.value))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.4


class Sampling(keras.layers.Layer):
    """Adds noise in every call, as a variational autoencoder or Monte Carlo dropout does."""

    def __init__(self, held: bool) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(5) if held else None

    def call(self, x: Any) -> Any:
        return x + keras.random.normal(tf.shape(x), seed=self.generator)


class SampledTwice(keras.Model):
    """Also draws in its own `test_step`, where Keras uses the global generator."""

    def __init__(self, held: bool) -> None:
        super().__init__()
        self.layer, self.sampling = keras.layers.Dense(1), Sampling(held)

    def call(self, x: Any) -> Any:
        return self.sampling(self.layer(x))

    def test_step(self, data: Any) -> Any:
        x, y = data
        noise = keras.random.normal((tf.shape(x)[0], 1), seed=self.sampling.generator)
        return {"squared": tf.reduce_mean((self(x) + noise - y) ** 2)}


@pytest.mark.parametrize("held", [True, False], ids=["a generator of its layer", "the program's generator"])
def test_predictions_draw_for_each_row_and_each_call(mirrored2: tfdist.Strategy, held: bool) -> None:
    model = SampledTwice(held)
    model.compile("sgd", "mse")
    tfdist.distribute(model, mirrored2)
    once, again = (model.predict(np.zeros((400, 2)), batch_size=400, verbose=0).ravel() for _ in range(2))
    for one, other in ((once[:200], once[200:]), (once, again)):  # compares replicas, then calls
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.3
    assert abs(np.std(once) - 1.0) < 0.2


@pytest.mark.parametrize("held", [True, False], ids=["a generator of its layer", "the program's generator"])
@pytest.mark.parametrize("name", ["single", "mirrored2"])
def test_evaluation_draws(name: str, held: bool, request: pytest.FixtureRequest) -> None:
    model = SampledTwice(held)
    model.compile("sgd", "mse")
    tfdist.distribute(model, request.getfixturevalue(name))
    x, y = np.zeros((4000, 2)), np.zeros((4000, 1))
    once, again = (model.evaluate(x, y, batch_size=1000, verbose=0, return_dict=True)["squared"] for _ in range(2))
    assert once != again
    assert abs(once - 2.0) < 0.5  # the variance of two draws, for the last batch, as in plain Keras


@pytest.mark.parametrize("held", [True, False], ids=["a generator of its layer", "the program's generator"])
def test_the_trainers_evaluation_draws_the_same_each_time(mirrored2: tfdist.Strategy, held: bool) -> None:
    with mirrored2.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros"), Sampling(held)])
        trainer = tfdist.Trainer(model, optimizer="sgd", loss="mse")
    data = np.zeros((4000, 2), "float32"), np.zeros((4000, 1), "float32")
    once, again = (trainer.evaluate(data, batch_size=1000) for _ in range(2))
    assert once == again
    assert once["loss"] == pytest.approx(1.0, abs=0.2)
