"""Hierarchical local SGD against NumPy, in float64, with groups of two levels and uneven rows."""

import keras
import numpy as np
import pytest

import tfdist
from tests.synchronization.linear_regression import (
    RATE,
    Regression,
    X,
    Y,
    assert_close,
    fit,
    of_replicas,
    trainer_of,
)
from tfdist import keras_internals
from tfdist.config.sync import parse_sync
from tfdist.errors import InputError

ROWS = (3, 3, 3, 2)
SYNC = "hierarchical_local_sgd(periods=(2, 4), group_sizes=(2,))"


@pytest.fixture
def mirrored4(float64):
    return tfdist.load_strategy("mirrored", devices=4)


def in_numpy(run, steps):
    """Returns each replica's weights after these steps."""
    local, since_pair, since_all = [run.start.copy() for _ in ROWS], np.zeros(4), np.zeros(4)
    for step in range(steps):
        local = [w - RATE * run.gradient(step, r, w, ROWS) for r, w in enumerate(local)]
        since_pair += ROWS
        since_all += ROWS
        if (step + 1) % 4 == 0:
            local = [np.average(local, axis=0, weights=since_all)] * 4
            since_pair[:] = since_all[:] = 0
        elif (step + 1) % 2 == 0:
            for pair in ((0, 1), (2, 3)):
                mean = np.average([local[r] for r in pair], axis=0, weights=since_pair[list(pair)])
                for r in pair:
                    local[r] = mean
            since_pair[:] = 0
    return local


@pytest.mark.parametrize(("steps", "log_every"), [(6, 10), (8, 10), (9, 1)])  # records are borders of calls
def test_numpy(steps, log_every, mirrored4):
    run = Regression(mirrored4, SYNC)
    run.fit(steps, batch_size=sum(ROWS), schedule=tfdist.Schedule(log_every=log_every))
    assert_close(run.replicas(), in_numpy(run, steps))
    with pytest.raises(AssertionError):
        assert_close(run.replicas(), in_numpy(run, steps - 1))


def test_the_state_of_the_optimizer_is_averaged_within_groups(mirrored4):
    def velocities(state):
        with mirrored4.scope():
            sgd = keras.optimizers.SGD(RATE, 0.9)
        sync = f"hierarchical_local_sgd(periods=(2, 4), group_sizes=(2,), state={state})"
        trainer = trainer_of(mirrored4, sync, optimizer=sgd)
        fit(trainer, 2, 12)
        return [of_replicas(mirrored4, v) for v in keras_internals.slots(sgd)]

    for own, averaged in zip(velocities("local"), velocities("averaged"), strict=True):
        for pair in ((0, 1), (2, 3)):
            mean = np.mean([own[r] for r in pair], axis=0)
            assert_close([averaged[r] for r in pair], [mean, mean])


def test_three_levels_and_compression(mirrored4):
    sync = "hierarchical_local_sgd(periods=(1, 2, 6), group_sizes=(1, 2))"
    trainer = trainer_of(mirrored4, sync, compression="topk(ratio=0.2)", compression_min_bytes=0)
    fit(trainer, 6, 12)
    kernel, _ = trainer.model.trainable_variables
    first, *others = of_replicas(mirrored4, kernel)
    assert all((first == other).all() for other in others)


def test_one_replica_has_no_groups(float64):
    trainer = trainer_of(tfdist.load_strategy("single"), SYNC)
    fit(trainer, 4, 12)
    assert trainer.step == 4


def test_a_compression_with_equal_factors_is_refused(mirrored4):
    trainer = trainer_of(mirrored4, SYNC, compression="powersgd(rank=1)", compression_min_bytes=0)
    with pytest.raises(InputError, match="powersgd needs equal factors on all"):
        trainer.build((X, Y))


def test_groups():
    assert parse_sync(SYNC).groups(4) == [(0, 1), (2, 3)]
    assert parse_sync("hierarchical_local_sgd(periods=(1, 2, 4), group_sizes=(2, 4))").groups(8) == [
        (0, 1), (2, 3), (4, 5), (6, 7), (0, 1, 2, 3), (4, 5, 6, 7)
    ]  # fmt: skip
    for replicas in (2, 3):
        with pytest.raises(InputError, match="group_sizes must divide the number of replicas"):
            parse_sync(SYNC).groups(replicas)
