"""Keras's own `fit`, `evaluate` and `predict` on a mesh give the results of plain Keras, in float64, including metrics."""

import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.keras_fit.comparing import both, differences, plain_run
from tests.keras_fit.models import PROGRAMS, run
from tests.selection import quick
from tests.step.user_metrics import Moving, OfBatches, Peak, where_positive
from tests.workers import running
from tfdist.errors import InputError

RANDOM = np.random.default_rng(3)
X, Y, WEIGHTS = RANDOM.normal(size=(22, 6)), RANDOM.integers(0, 4, 22), RANDOM.uniform(size=22)
ON_PROCESSES = "mesh(mesh_shape='data:2;model:2', layout='in:model')"
ON_FOUR = ("several_inputs_and_outputs", "shared_layers", "with_add_loss", "custom_metrics", "sparse_gradients")


def network(**options: Any) -> keras.Model:
    hidden = keras.layers.Dense(8, activation="relu", kernel_regularizer="l2")
    model = keras.Sequential([keras.Input((6,)), hidden, keras.layers.BatchNormalization(), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], weighted_metrics=["accuracy"], **options)
    return model


class NotBuilt(keras.Model):
    """Creates its variables when it is first called."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(4)

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))


def dataset(size: int, *arrays: np.ndarray) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays if len(arrays) > 1 else arrays[0]).batch(size)


def without_training(model: keras.Model) -> list[Any]:
    """Batches of 8, 7 and 5 rows are not divisible by the batch axis, or the last of them is not."""
    return [
        model.predict(X, batch_size=8, verbose=0),
        model.predict(dataset(7, X), verbose=0),
        model.predict_on_batch(X[:5]),
        model.evaluate(X, Y, sample_weight=WEIGHTS, batch_size=8, verbose=0, return_dict=True),
        model.evaluate(dataset(7, X, Y), verbose=0),
        model.test_on_batch(X[:5], Y[:5], WEIGHTS[:5]),
    ]


def training(model: keras.Model) -> list[Any]:
    stop = keras.callbacks.EarlyStopping("accuracy", patience=0, restore_best_weights=True)
    arrays = model.fit(X, Y, batch_size=8, epochs=2, validation_split=0.25, callbacks=[stop], verbose=0)
    more = model.fit(dataset(7, X, Y), epochs=2, shuffle=False, verbose=0)
    return [arrays.history, more.history, model.train_on_batch(X[:6], Y[:6]), model.predict(X, verbose=0)]


@pytest.mark.parametrize("mesh", ["mesh2x2", "mesh4x1"])
def test_evaluation_and_prediction(mesh: str, float64: None, request: pytest.FixtureRequest) -> None:
    assert not differences(*both(request.getfixturevalue(mesh), network, without_training))


@pytest.mark.processes
def test_training(mesh2x2: tfdist.Strategy, float64: None) -> None:
    assert not differences(*both(mesh2x2, network, training))


@pytest.mark.processes
@pytest.mark.parametrize("shard", quick(["optimizer", "gradients", "parameters"], "parameters"))
def test_sharded_state(shard: str, float64: None) -> None:
    options = {"shard": shard, "shard_min_elements": 1, "environment": {}}
    strategy = tfdist.load_strategy("mesh", mesh_shape="data:4", **options)
    assert not differences(*both(strategy, network, training))


def test_accumulation(mesh2x2: tfdist.Strategy, float64: None) -> None:
    def accumulated(model: keras.Model) -> Any:
        model.layers[1].trainable = False  # otherwise its moments are those of a micro-step's rows
        return model.fit(X[:16], Y[:16], sample_weight=WEIGHTS[:16], batch_size=8, verbose=0).history

    assert not differences(*both(mesh2x2, network, accumulated, accumulate_steps=2))


def test_values_of_all_rows(mesh2x2: tfdist.Strategy, float64: None) -> None:
    """A loss that divides by a sum, and metrics that do not add up over batches."""

    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
        model.compile(keras.optimizers.SGD(0.1), where_positive, metrics=[Peak(), Moving(), OfBatches()])
        return model

    def use(model: keras.Model) -> Any:
        history = model.fit(X, X[:, :4], batch_size=8, epochs=2, shuffle=False, verbose=0).history
        return history, model.evaluate(X, X[:, :4], batch_size=8, verbose=0, return_dict=True)

    assert not differences(*both(mesh2x2, make, use))


def test_a_model_without_variables_yet(mesh2x2: tfdist.Strategy, float64: None) -> None:
    def make() -> keras.Model:
        model = NotBuilt()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    assert not differences(*both(mesh2x2, make, lambda model: model.predict(X, verbose=0)))
    assert not differences(*both(mesh2x2, make, lambda model: model.fit(X, Y, verbose=0).history))


def test_the_model_of_a_trainer(mesh2x2: tfdist.Strategy, float64: None) -> None:
    with mesh2x2.scope():
        model = network()
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.SGD(0.1), loss=model.loss, metrics=["accuracy"])
    trainer.fit(X[:16], Y[:16], batch_size=8)
    tfdist.distribute(model, mesh2x2)
    expected = trainer.evaluate((X, Y), batch_size=7)
    found = model.evaluate(X, Y, batch_size=5, verbose=0, return_dict=True)
    assert found["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-9)
    guessed = np.argmax(model.predict(X, batch_size=5, verbose=0), axis=1)
    assert np.mean(guessed == Y) == pytest.approx(expected["accuracy"], rel=1e-9)
    trainer.fit(X[:16], Y[:16], batch_size=8)


def test_a_file_of_the_model(mesh2x2: tfdist.Strategy, float64: None, tmp_path: pathlib.Path) -> None:
    with mesh2x2.scope():
        model = tfdist.distribute(network())
    model.fit(X[:8], Y[:8], verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-9, atol=1e-9)


@pytest.mark.full
@pytest.mark.parametrize("name", ON_FOUR)
def test_programs(name: str, mesh4x1: tfdist.Strategy, float64: None) -> None:
    expected = plain_run(name)
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    with mesh4x1.scope():
        program = PROGRAMS[name]()
    tfdist.distribute(program.model, mesh4x1)
    assert not differences(run(program), expected)


@pytest.mark.processes
def test_processes(float64: None, tmp_path: pathlib.Path) -> None:
    """Two processes with two devices each; each has all weights, logs and predictions."""
    names = ["functional"]
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "1"}
    outcomes = running.outcomes("keras_fit", ON_PROCESSES, 2, tmp_path, *names, seconds=400, environment=threads)
    for outcome in outcomes:
        assert not {name: found for name in names if (found := differences(outcome[name], plain_run(name)))}


class OwnStep(keras.Sequential):
    def train_step(self, data: Any) -> dict[str, Any]:
        return super().train_step(data)


def own_step() -> keras.Model:
    model = OwnStep([keras.Input((6,)), keras.layers.Dense(4)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def accumulate_uneven_batches(strategy: tfdist.Strategy) -> None:
    with strategy.scope():
        model = network()
    tfdist.distribute(model, strategy, accumulate_steps=2).fit(X[:7], Y[:7], verbose=0)


def compile_outside(strategy: tfdist.Strategy) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    tfdist.distribute(model, strategy).evaluate(X, X[:, :4], verbose=0)


def distributed(strategy: tfdist.Strategy, make: Callable[[], keras.Model] = network, **options: Any) -> keras.Model:
    with strategy.scope():
        return tfdist.distribute(make(), strategy, **options)


REFUSED: dict[str, tuple[Callable[[tfdist.Strategy], Any], str]] = {
    "created outside": (
        lambda mesh: tfdist.distribute(network(), mesh).predict(X, verbose=0),
        "On a mesh, a model must be created and compiled inside the strategy's scope. Received: sequential",
    ),
    "compiled outside": (compile_outside, "inside the strategy's scope. Received: .*created outside"),
    "a step of its own": (
        lambda mesh: distributed(mesh, own_step).fit(X, Y, verbose=0),
        "by Keras's own steps. Received: OwnStep, which overrides train_step",
    ),
    "eager": (
        lambda mesh: distributed(mesh, lambda: network(run_eagerly=True)).fit(X, Y, verbose=0),
        "On a mesh, every step is compiled. Received: run_eagerly=True",
    ),
    "compression": (
        lambda mesh: distributed(mesh, compression="fp16"),
        "DTensor reduces gradients itself: leave out compression",
    ),
    "jit_compile": (
        lambda mesh: distributed(mesh, jit_compile=True),
        "DTensor compiles its programs itself: leave out jit_compile",
    ),
    "accumulation": (accumulate_uneven_batches, "Received: a batch of 7 rows, 2 shards and 2 micro-steps"),
    "ragged": (
        lambda mesh: distributed(mesh).predict(
            tf.data.Dataset.from_tensors(tf.ragged.constant([[1.0], []])), verbose=0
        ),
        "a batch must consist of dense tensors. Received: a RaggedTensor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_mesh_does_not_support_is_refused(case: str, mesh2x2: tfdist.Strategy) -> None:
    use, message = REFUSED[case]
    with pytest.raises(InputError, match=message) as caught:
        use(mesh2x2)
    assert "\n" not in str(caught.value)
