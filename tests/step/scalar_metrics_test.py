"""Scalars in Keras's means, by the trainer: the numbers of plain Keras on one device, in float64."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.keras_fit.comparing import differences
from tests.keras_fit.models import Size, error
from tfdist.step.metrics import weight_scalars

X = np.random.default_rng(0).normal(size=(14, 5))
Y = np.random.default_rng(1).normal(size=(14, 2))


def network() -> keras.Model:
    return keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "tanh"), Size(), keras.layers.Dense(2)])


def start_again() -> None:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)


def made(strategy: tfdist.Strategy, **options: Any) -> tfdist.Trainer:
    start_again()
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
        return tfdist.Trainer(network(), optimizer=optimizer, loss="mse", metrics=[error], **options)


def plain() -> keras.Model:
    start_again()
    model = network()
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[error])
    return model


def of_keras(found: dict[str, Any]) -> dict[str, Any]:
    return {"loss": found["loss"], "error": found["error"], "sizes_size": found["size"]}


@pytest.mark.parametrize("micro_steps", [1, 2])
def test_the_trainer_fits(float64: None, mirrored2: tfdist.Strategy, micro_steps: int) -> None:
    """Replicas have 7 and 6 rows, in micro-steps of 4 or 3."""
    trainer, model = made(mirrored2, accumulate_steps=micro_steps), plain()
    data = (X[:13], Y[:13])
    for _ in range(2):
        history = model.fit(*data, batch_size=13, verbose=0).history
        found = trainer.fit(data, batch_size=13, steps=1).last("train")
        expected = of_keras({name: value for name, [value] in history.items()})
        assert not differences({name: found[name] for name in expected}, expected)


@pytest.mark.parametrize("strategy", ["single", "mirrored2"])
@pytest.mark.parametrize("size", [13, 11, 4])
def test_the_trainer_evaluates_as_one_batch(
    float64: None, strategy: str, size: int, request: pytest.FixtureRequest
) -> None:
    """The last batch has three rows, or one, of which the second replica has none."""
    data = (X[:size], Y[:size])
    found = made(request.getfixturevalue(strategy)).evaluate(data, batch_size=5)
    assert not differences(found, of_keras(plain().evaluate(*data, batch_size=size, return_dict=True, verbose=0)))


def test_a_mesh_has_all_rows(float64: None, mesh2x2: tfdist.Strategy) -> None:
    trainer = made(mesh2x2)
    found = trainer.evaluate((X[:12], Y[:12]), batch_size=4)
    assert not differences(
        found, of_keras(plain().evaluate(X[:12], Y[:12], batch_size=12, return_dict=True, verbose=0))
    )


class Updates:
    """Ways to update a mean with 8."""

    def __init__(self) -> None:
        self.mean = keras.metrics.Mean()
        self.inner = tf.function(self.scalar, autograph=False)

    def scalar(self) -> None:
        self.mean.update_state(8)

    def in_a_condition(self) -> None:
        tf.cond(tf.random.uniform([]) < 2, lambda: (self.scalar(), 0)[1], lambda: 0)

    def in_a_function(self) -> None:
        self.inner()


COUNTS = {"scalar": 0.25, "in_a_condition": 0.25, "in_a_function": 1}


@pytest.mark.parametrize("name", COUNTS)
def test_scalars_are_weighted_where_a_replica_s_code_is_traced(name: str) -> None:
    """Traced twice, as for batches of different forms."""
    updates = Updates()

    def replica_function(rows: tf.Tensor) -> None:
        with weight_scalars(tf.size(rows) / 4):
            getattr(updates, name)()

    for _ in range(2):
        tf.function(replica_function, autograph=False)(tf.zeros([1]))
    assert float(updates.mean.count) == 2 * COUNTS[name]
    assert float(updates.mean.result()) == 8
