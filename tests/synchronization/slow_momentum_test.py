"""Slow momentum against NumPy, in float64: `slowmo`."""

import keras
import numpy as np
import pytest

from tests.selection import quick
from tests.synchronization.linear_regression import RATE, REPLICAS, ROWS, Regression, Schedule, assert_close
from tfdist.grammar.sync import SlowMo, parse_sync

OTHER = "slowmo(period=3, momentum=0.5, learning_rate=0.8)"


def constant(step):
    return RATE


def falling(step):
    return RATE / (1 + step)


def ends(step):
    return RATE if step < 4 else 0.0


def in_numpy(run, sync: SlowMo, rate, steps):
    """Returns the global weights after a number of steps that ends with an exchange."""
    whole, momentum = run.start.copy(), np.zeros_like(run.start)
    for begin in range(0, steps, sync.period):
        local = [whole.copy() for _ in range(REPLICAS)]
        for step in range(begin, begin + sync.period):
            local = [w - rate(step) * run.gradient(step, r, w) for r, w in enumerate(local)]
        mean, gamma = np.average(local, axis=0, weights=ROWS), rate(begin + sync.period - 1)
        if gamma:
            momentum = sync.momentum * momentum + (whole - mean) / gamma
            whole = whole - sync.learning_rate * gamma * momentum
        else:
            whole = whole - sync.learning_rate * (whole - mean)
            momentum = sync.momentum * momentum
    return whole


@pytest.mark.parametrize("rate", quick([constant, falling, ends], falling, ends))
@pytest.mark.parametrize("sync", quick(["slowmo(period=2)", OTHER], OTHER))
def test_numpy(sync, rate, mirrored3):
    run = Regression(mirrored3, sync, lambda: keras.optimizers.SGD(Schedule(rate)))
    run.fit(12)
    assert_close(run.evaluated(), in_numpy(run, parse_sync(sync), rate, 12))


@pytest.mark.full
def test_a_rate_that_a_callback_changes(mirrored3):
    def rate(step):
        return RATE if step < 6 else RATE / 10

    class Lowers(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.learning_rate = rate(batch)

    run = Regression(mirrored3, "slowmo(period=3)")
    run.fit(12, callbacks=[Lowers()])
    assert_close(run.evaluated(), in_numpy(run, SlowMo(period=3), rate, 12))


@pytest.mark.parametrize("state", quick(["local", "averaged", "reset"], "averaged"))
def test_without_momentum_it_is_local_sgd(state, mirrored3):
    def adam():
        return keras.optimizers.Adam(0.01)

    slow = Regression(mirrored3, f"slowmo(period=3, momentum=0, learning_rate=1, state={state})", adam)
    plain = Regression(mirrored3, f"local_sgd(period=3, state={state})", adam)
    for run in (slow, plain):
        run.fit(8)
    assert_close(slow.evaluated(), plain.evaluated())
    with_momentum = Regression(mirrored3, f"slowmo(period=3, state={state})", adam)
    with_momentum.fit(8)
    with pytest.raises(AssertionError):
        assert_close(with_momentum.evaluated(), plain.evaluated())


@pytest.mark.full
def test_with_an_exchange_after_every_step_it_is_a_momentum_of_sums(mirrored3):
    """With plain SGD and a period of 1, u is the momentum of heavy-ball SGD."""
    slow = Regression(mirrored3, "slowmo(period=1, momentum=0.75)")
    heavy = Regression(mirrored3, "every_step", lambda: keras.optimizers.SGD(RATE, momentum=0.75))
    for run in (slow, heavy):
        run.fit(6)
    assert_close(slow.evaluated(), heavy.evaluated())
