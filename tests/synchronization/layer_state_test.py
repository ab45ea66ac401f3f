"""State with which layers compute in training: replicas have their own, as of weights, and exchange it with the weights."""

import itertools

import keras
import numpy as np
import pytest

import tfdist
from tests.selection import quick
from tests.synchronization.linear_regression import BATCH, X, Y, fit, of_replicas, trainer_of
from tests.workers.row_dependence import Centering

LAYERS = {
    "centering": Centering,
    "spectral": lambda: keras.layers.SpectralNormalization(keras.layers.Dense(4)),
    "batch": keras.layers.BatchNormalization,
}
SYNCS = [
    "local_sgd(period=4)",
    "post_local_sgd(warmup_steps=3, period=2)",
    "diloco(period=4, fragments=2)",
    "local_sgd(period=4, delay=1)",
    "easgd(period=3)",
    "hierarchical_local_sgd(periods=(2, 4), group_sizes=(2,))",
]

QUICK = [
    *((sync, "centering") for sync in SYNCS),
    ("local_sgd(period=4)", "spectral"),
    ("post_local_sgd(warmup_steps=3, period=2)", "batch"),
]


def values(trainer):
    return [np.asarray(of_replicas(trainer.strategy, variable)) for variable in trainer.model.variables]


@pytest.mark.parametrize("case", quick(itertools.product(SYNCS, LAYERS), *QUICK), ids="-".join)
def test_evaluations_and_checkpoints_change_nothing(case, tmp_path, float64):
    sync, layers = case
    strategy = tfdist.load_strategy("mirrored", devices=4 if "hierarchical" in sync else 3)
    plain = trainer_of(strategy, sync, layers=[LAYERS[layers]])
    fit(plain, 10)
    trainer = trainer_of(strategy, sync, layers=[LAYERS[layers]])
    fit(
        trainer,
        10,
        validation_data=(X, Y),
        schedule=tfdist.Schedule(eval_every=3),
        checkpoints=tfdist.Checkpoints(directory=str(tmp_path), every=3),
    )
    for one, other in zip(values(trainer), values(plain), strict=True):
        # The mean of three equal float64 numbers, as before local training, may differ from them in the last bit.
        np.testing.assert_allclose(one, other, rtol=1e-12 if "post" in sync else 0)


@pytest.mark.parametrize(("layers", "batch_size"), [("centering", BATCH), ("batch", 6)])  # unequal shares, equal ones
def test_an_exchange_after_every_step_of_plain_sgd_equals_sums_of_gradients(layers, batch_size, mirrored3):
    trainer, reference = (
        trainer_of(mirrored3, sync, layers=[LAYERS[layers]]) for sync in ("local_sgd(period=1)", "every_step")
    )
    losses = fit(trainer, 5, batch_size).history["loss"]
    assert losses == pytest.approx(fit(reference, 5, batch_size).history["loss"], rel=1e-9)
    for one, other in zip(values(trainer), values(reference), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-15)


def test_an_evaluation_uses_the_mean_of_what_replicas_have_between_exchanges(mirrored3):
    trainer = trainer_of(mirrored3, "local_sgd(period=4)", layers=[Centering])
    fit(trainer, 6)
    center, kernel, bias = values(trainer)
    assert (center[0] != center[1]).any()
    wanted = (X - center.mean(axis=0)) @ np.average(kernel, axis=0, weights=[4, 3, 3])
    wanted += np.average(bias, axis=0, weights=[4, 3, 3])
    assert trainer.predict(X, verbose=0) == pytest.approx(wanted, rel=1e-9)
    assert trainer.evaluate(X, Y)["loss"] == pytest.approx(np.mean((wanted - Y) ** 2), rel=1e-9)


def test_states_of_the_layers_of_a_group_are_equal_after_its_exchange(float64):
    sync = "hierarchical_local_sgd(periods=(2, 8), group_sizes=(2,))"
    trainer = trainer_of(tfdist.load_strategy("mirrored", devices=4), sync, layers=[Centering])
    fit(trainer, 6)
    center, *_ = values(trainer)
    assert (center[0] == center[1]).all()
    assert (center[2] == center[3]).all()
    assert (center[0] != center[2]).all()


def test_a_run_that_resumes_without_exchanges_begins_with_the_mean(mirrored3, tmp_path):
    trainer = trainer_of(mirrored3, "local_sgd(period=4)", layers=[Centering])
    fit(trainer, 3, checkpoints=tfdist.Checkpoints(directory=str(tmp_path), every=3))
    center, *_ = values(trainer)
    resuming = trainer_of(mirrored3, "every_step", layers=[Centering])
    resuming.build((X, Y))
    assert resuming.resume(tmp_path) == 3
    found, *_ = values(resuming)
    assert found == pytest.approx(np.tile(center.mean(axis=0), (3, 1)), rel=1e-12)
