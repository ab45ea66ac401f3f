"""Where models are created, and what programs do besides `fit`; on two replicas, compared with plain Keras."""

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.adding_loss import AddsLoss
from tests.keras_fit.comparing import differences
from tests.selection import quick

X = np.random.default_rng(0).normal(size=(22, 5))
Y = np.random.default_rng(1).integers(0, 3, 22)
Use = Callable[[keras.Model], Any]


def network() -> keras.Model:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fitted(model: keras.Model) -> Any:
    return model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history


def by_a_loop_of_its_own(model: keras.Model) -> Any:
    """Fits twice, with a custom loop of another optimizer in between, compiled and eager."""
    first = fitted(model)
    optimizer, loss_fn = keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(True)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
        return loss

    losses = [float(step(X[:8], Y[:8])), float(tf.function(step)(X[8:16], Y[8:16]))]
    return first, losses, fitted(model)


def frozen_and_thawed(model: keras.Model) -> Any:
    model.layers[0].trainable = False
    model.compile("sgd", "sparse_categorical_crossentropy")
    first = fitted(model)
    model.layers[0].trainable = True
    model.compile("sgd", "sparse_categorical_crossentropy")
    return first, fitted(model)


def with_numbers_of_the_optimizer(model: keras.Model) -> Any:
    fitted(model)
    model.optimizer.learning_rate = 0.5 * float(model.optimizer.learning_rate)
    return int(model.optimizer.iterations), fitted(model)


def of_weights_that_decay_but_some(model: keras.Model) -> Any:
    """The optimizer refers to variables, and to their names, before they are placed."""
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel], var_names=["dense_1/bias"])
    model.compile(optimizer, "sparse_categorical_crossentropy")
    return fitted(model)


def with_an_optimizer_that_has_stepped(model: keras.Model) -> Any:
    """Its slots and its references to variables are placed with them."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(X) ** 2)
    model.optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
    return fitted(model)


USES: tuple[Use, ...] = (
    fitted,
    by_a_loop_of_its_own,
    frozen_and_thawed,
    with_numbers_of_the_optimizer,
    of_weights_that_decay_but_some,
    with_an_optimizer_that_has_stepped,
)


def run(use: Use, strategy: tfdist.Strategy | None, made_inside: bool = False, used_inside: bool = False) -> Any:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    nowhere = contextlib.nullcontext()
    with strategy.scope() if strategy and made_inside else nowhere:
        model = network()
    if strategy:
        tfdist.distribute(model, strategy)
    with strategy.scope() if strategy and used_inside else nowhere:
        found = use(model)
    return found, model.get_weights()


@pytest.mark.parametrize("use", quick(USES, *USES[:3]), ids=lambda use: use.__name__)
def test_a_model_of_no_scope(use: Use, float64: None, mirrored2: tfdist.Strategy) -> None:
    assert not differences(run(use, mirrored2), run(use, None))


@pytest.mark.parametrize("used_inside", [True, False])
@pytest.mark.parametrize("use", [fitted, with_numbers_of_the_optimizer], ids=lambda use: use.__name__)
def test_a_model_of_the_scope(use: Use, used_inside: bool, float64: None, mirrored2: tfdist.Strategy) -> None:
    assert not differences(run(use, mirrored2, made_inside=True, used_inside=used_inside), run(use, None))


@pytest.mark.parametrize("place", [1, 2])
def test_a_loss_of_a_layer_beside_one_that_communicates(place: int, float64: None, mirrored2: tfdist.Strategy) -> None:
    """While a replica waits for communication in its forward pass, another one continues and adds its own losses."""

    def fit(strategy: tfdist.Strategy | None) -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        layers.insert(place, AddsLoss())
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile("sgd", "sparse_categorical_crossentropy")
        if strategy:
            tfdist.distribute(model, strategy, batch_norm="synchronized")
        return fitted(model), model.get_weights()

    assert not differences(fit(mirrored2), fit(None))


@pytest.mark.parametrize("strategy", ["single", "mirrored2"])
def test_steps_of_fit_are_no_loop_of_its_own(
    strategy: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tfdist.distribute(network(), request.getfixturevalue(strategy))
    monkeypatch.setattr("tfdist.keras_fit.patches.warn_once", lambda text: pytest.fail("taken for a loop of its own"))
    fitted(model)
