"""Models on a mesh that are used as if they were on one device: one line names the remedy, at every entry."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.config.layouts import Layout
from tfdist.errors import InputError

X, Y = np.zeros((8, 6), "float32"), np.zeros(8, "int64")
BATCHES = tf.data.Dataset.from_tensors((X, Y))


def network(**options: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"], **options)
    return model


def not_built() -> keras.Model:
    model = keras.Sequential([keras.layers.Dense(4)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def custom_loop(model: keras.Model) -> None:
    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        return tf.reduce_sum(model(X))

    step()


ENTRIES: dict[str, Callable[[keras.Model], Any]] = {
    "fit": lambda model: model.fit(X, Y, verbose=0),
    "evaluate": lambda model: model.evaluate(BATCHES, verbose=0),
    "predict": lambda model: model.predict(X, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
    "test_on_batch": lambda model: model.test_on_batch(X, Y),
    "predict_on_batch": lambda model: model.predict_on_batch(X),
    "call": lambda model: model(X),
    "call of a layer": lambda model: model.layers[-1](tf.constant(X)),
}


def refused(model: keras.Model, entry: str) -> None:
    with pytest.raises(InputError, match="A model on a mesh .* Received: a call of .* tfdist.distribute") as caught:
        ENTRIES[entry](model)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_model_that_is_not_distributed_is_refused(entry: str, mesh2x2: tfdist.Strategy) -> None:
    with mesh2x2.scope():
        model = network()
    refused(model, entry)
    with mesh2x2.scope():
        refused(model, entry)


@pytest.mark.parametrize("entry", ["fit", "evaluate", "predict", "train_on_batch"])
def test_so_is_one_without_variables_yet(entry: str, mesh2x2: tfdist.Strategy) -> None:
    with mesh2x2.scope():
        model = not_built()
    refused(model, entry)


def test_so_are_run_eagerly_and_custom_loops(mesh2x2: tfdist.Strategy) -> None:
    with mesh2x2.scope():
        refused(network(run_eagerly=True), "fit")
        model = network()
    with pytest.raises(InputError, match="A model on a mesh"):
        custom_loop(model)


@pytest.mark.parametrize("is_argument", [True, False])
def test_programs_of_dtensors_are_not_affected(is_argument: bool, mesh2x2: tfdist.Strategy) -> None:
    with mesh2x2.scope():
        model = network()
    x = mesh2x2.devices.place(X, Layout(("data", None)))

    @tf.function(autograph=False)
    def total(*given: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(model(given[0] if given else x))

    assert float(total(*[x] * is_argument)) == 0.0


def test_building_is_not_affected_and_neither_are_other_models(mesh2x2: tfdist.Strategy) -> None:
    with mesh2x2.scope():
        inner = keras.Sequential([keras.layers.Dense(4)])
        inner(np.zeros((2, 6), "float32"))  # creates its variables
        outer = keras.Model(inputs := keras.Input((6,)), keras.layers.Dense(2)(inner(inputs)))
    assert outer(keras.KerasTensor((None, 6))).shape == (None, 2)
    assert keras.models.clone_model(outer).predict(X, verbose=0).shape == (8, 2)
