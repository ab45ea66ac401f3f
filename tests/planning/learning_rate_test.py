"""A search for the learning rate suggests a rate that trains, and leaves no trace in the trainer."""

import keras
import numpy as np
import pytest

import tfdist
from tests.end_to_end.resume.exact_test import IMAGES, LABELS, make_trainer
from tfdist import keras_internals
from tfdist.errors import InputError, NotFiniteError

SEARCH = {"batch_size": 8, "min": 1e-5, "max": 10.0, "steps": 20, "verbose": 0}


def state(trainer):
    """Returns the bytes of every variable on every replica of this process."""
    program = trainer.program
    variables = [*trainer.model.variables, *trainer.model.optimizer.variables]
    held = [keras_internals.value_of(variable) for variable in variables]
    held += [variable for _, variable in program.store.items()]
    return [[np.asarray(v).tobytes() for *_, v in trainer.strategy.blocks.copies(variable)] for variable in held]


def fit(trainer, steps=6):
    history = trainer.fit((IMAGES, LABELS), batch_size=8, steps=steps, verbose=0)
    return [record["loss"] for record in history.records], state(trainer)


STATEFUL = {"ema": 0.9, "compression": "topk(ratio=0.3)", "compression_min_bytes": 0}


@pytest.mark.parametrize(
    ("name", "options"), [("mirrored2", STATEFUL), pytest.param("single", {}, marks=pytest.mark.full)]
)
def test_a_run_after_a_search_is_one_that_never_searched(name, options, request):
    """The model has dropout and batch normalization, and the optimizer a schedule."""
    strategy = request.getfixturevalue(name)
    expected = fit(make_trainer(strategy, **options))
    trainer = make_trainer(strategy, **options)
    before = state(trainer)
    result = tfdist.find_learning_rate(trainer, (IMAGES, LABELS), **SEARCH)
    assert state(trainer)[: len(before)] == before
    assert trainer.step == 0 and len(result.losses) > 4
    assert fit(trainer) == expected


def test_a_search_leaves_no_trace_on_a_mesh(mesh2x2):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    x, y = np.random.default_rng(0).normal(size=(32, 8)).astype("float32"), np.arange(32) % 4
    with mesh2x2.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.Adam(0.01), loss=loss)
    trainer.build(tfdist.data.ArraySource((x, y)))
    before = state(trainer)
    result = tfdist.find_learning_rate(trainer, x, y, **SEARCH)
    assert state(trainer) == before
    assert len(result.losses) > 4 and result.losses[0] != result.losses[-1]


def linear(strategy, curvature, rate=1e9):
    """Returns a trainer and data with a mean squared error whose second derivatives are all `curvature`."""
    keras.utils.clear_session(free_memory=False)
    x = np.sqrt(curvature / 2 * 4) * np.tile(np.eye(4), (4, 1)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.SGD(rate), loss="mse")
    return trainer, x, (x @ np.ones((4, 1))).astype("float32")


@pytest.mark.parametrize("curvature", [0.1, pytest.param(10.0, marks=pytest.mark.full)])
def test_the_suggestion_for_a_quadratic_is_in_its_stable_range(curvature, mirrored2):
    """Gradient descent on a quadratic of curvature c diverges for rates above 2 / c; here every batch has all rows."""
    trainer, x, y = linear(mirrored2, curvature)
    result = tfdist.find_learning_rate(trainer, x, y, batch_size=16, min=1e-6, max=1e4, steps=120, verbose=0)
    stable = 2 / curvature
    assert stable / 100 < result.suggestion < stable / 2
    assert stable < result.diverged < 100 * stable
    w, losses = np.zeros(4), []
    for rate in result.rates:
        losses.append(curvature / 2 * np.sum((w - 1) ** 2))
        w -= rate * curvature * (w - 1)
    before = sum(rate < 1 / curvature for rate in result.rates)  # rounding errors of the rates are amplified beyond it
    np.testing.assert_allclose(result.losses[:before], losses[:before], rtol=1e-3, atol=1e-6)


def test_the_first_rate_is_the_minimum_whatever_the_optimizers_rate(single):
    trainer, x, y = linear(single, 1.0, keras.optimizers.schedules.CosineDecay(1e9, 10))
    result = tfdist.find_learning_rate(trainer, x, y, batch_size=16, min=1e-3, max=1.0, steps=10, verbose=0)
    assert result.rates == pytest.approx(np.geomspace(1e-3, 1.0, 10))
    assert result.losses[1] == pytest.approx(result.losses[0] * (1 - 1e-3) ** 2, rel=1e-5)
    assert result.diverged is None


def test_weights_are_restored_when_a_search_fails(single):
    trainer, x, y = linear(single, 1.0)
    trainer.build(tfdist.data.ArraySource((x, y)))
    before = state(trainer)
    with pytest.raises(NotFiniteError, match="Look for inf and NaN in the data"):
        tfdist.find_learning_rate(trainer, x, np.full_like(y, np.nan), batch_size=16, verbose=0)
    assert state(trainer) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min": 1.0, "max": 0.1}, "min must be less than max. Received: min=1, max=0.1"),
        ({"batch_size": 1}, "batch_size must be at least"),
    ],
)
def test_wrong_arguments(options, message, mirrored2):
    with pytest.raises(InputError, match=message):
        tfdist.find_learning_rate(make_trainer(mirrored2), (IMAGES, LABELS), **(SEARCH | options))


def test_data_must_be_readable_again(single):
    def batches():
        while True:
            yield IMAGES[:8], LABELS[:8]

    with pytest.raises(InputError, match="data that can be read again. Received: a generator"):
        tfdist.find_learning_rate(make_trainer(single), batches(), steps_per_epoch=5, verbose=0)
