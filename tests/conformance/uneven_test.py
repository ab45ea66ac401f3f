"""Uneven allocations of rows give the result of one device, also if they change during the run."""

import dataclasses
import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.array_batches import ArrayBatches
from tests.conformance.conformance_test import assert_equal, outcomes
from tests.selection import quick
from tfdist import testing
from tfdist.data.augmentations import augmented
from tfdist.trainer.train_state import ReplicaSpeeds

CASES = (
    testing.Case(model="mlp", optimizer="adamw", batch_size=13, balance="weights(3,1)"),
    testing.Case(model="cnn", optimizer="sgd", balance="weights(1,2)"),
    testing.Case(model="masked", optimizer="sgd", batch_size=13, balance="weights(1,4)"),
    testing.Case(model="cnn_frozen", optimizer="sgd", weighted=True, balance="weights(100,1)"),
)
JOBS = {("multiworker", 2): CASES[::2], ("horovod", 2): CASES[1::2]}
ALLOCATIONS = ([1, 12], [9, 4], [12, 1], [5, 8])


@functools.cache
def reference(case: testing.Case) -> testing.Outcome:
    return testing.run_case(tfdist.load_strategy("single", environment={}), dataclasses.replace(case, balance="equal"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logical_devices(case, mirrored2, float64):
    outcome = testing.run_case(mirrored2, case)
    assert len(set(outcome.digests)) == 1
    assert_equal(outcome, reference(case))


def test_four_replicas_in_micro_steps(mirrored4, float64):
    """The last replica has fewer rows than micro-steps."""
    case = testing.Case(model="masked", optimizer="sgd", batch_size=13, balance="weights(8,4,2,1)")
    assert_equal(testing.run_case(mirrored4, case, accumulate_steps=3), reference(case))


@pytest.mark.processes
@pytest.mark.parametrize("job", quick(JOBS, ("horovod", 2)), ids=str)
def test_processes(job, float64):
    for rank in outcomes(*job, "float64", JOBS[job]):
        for case, outcome in zip(JOBS[job], rank, strict=True):
            assert_equal(outcome, reference(case))


def forced(monkeypatch) -> list[list[int]]:
    """Makes each decision another allocation; returns those that have begun."""
    begun, allocations = [], itertools.cycle(ALLOCATIONS)
    monkeypatch.setattr(ReplicaSpeeds, "propose", lambda speeds: list(next(allocations)))
    change = ReplicaSpeeds.change

    def noted(speeds, step, counts):
        begun.append(list(counts))
        change(speeds, step, counts)

    monkeypatch.setattr(ReplicaSpeeds, "change", noted)
    return begun


RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((70, 4, 4, 1)), RANDOM.standard_normal((70, 1))


SOURCES = {
    "arrays": lambda: tfdist.data.ArraySource((X, Y)),
    "augmented": lambda: augmented(tfdist.data.ArraySource((X, Y)), "flip|crop(padding=1)"),
    "stream": lambda: tf.data.Dataset.from_tensor_slices((X, Y)),
    "PyDataset": lambda: ArrayBatches((X, Y), 10),
    "generator": lambda: ArrayBatches((X, Y), 10).repeated(),
}


def trained(strategy, source, balance="equal"):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        hidden = [keras.layers.Flatten(), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4, 4, 1)), *hidden])
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.SGD(0.1), loss="mse", balance=balance)
    schedule = tfdist.Schedule(steps_per_call=5)
    trainer.fit(source(), batch_size=13, steps=90, steps_per_epoch=10, schedule=schedule, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("name", quick(SOURCES, "augmented", "generator"))
def test_an_allocation_that_changes_gives_one_devices_result(name, single, mirrored2, float64, monkeypatch):
    begun = forced(monkeypatch)
    found = trained(mirrored2, SOURCES[name], balance="measured")
    assert len(begun) >= 2
    for a, b in zip(found, trained(single, SOURCES[name]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)


def test_exchanges_of_weights_count_rows(mirrored2, float64):
    """With SGD and a constant allocation, exchanging weights after every step is summing gradients."""
    case = dataclasses.replace(CASES[0], optimizer="sgd", steps=8)
    found, wanted = testing.run_case(mirrored2, case, sync="local_sgd(period=1)"), reference(case)
    # An exchange ends a call, of which there are more.
    assert_equal(dataclasses.replace(found, losses=[]), dataclasses.replace(wanted, losses=[]))
