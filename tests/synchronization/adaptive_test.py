"""Local SGD with a period that changes, against NumPy, in float64: `adaptive`."""

import math

import keras
import numpy as np
import pytest

from tests.synchronization.linear_regression import (
    RATE,
    REPLICAS,
    ROWS,
    Regression,
    Schedule,
    assert_close,
    assert_two_fits_are_one,
)

STEPS = 24


def rate_of_falling(step):
    return RATE / (1 + 0.1 * step)


def falling():
    return keras.optimizers.SGD(Schedule(rate_of_falling))


def warmup():
    schedule = keras.optimizers.schedules.CosineDecay(RATE / 100, STEPS, warmup_target=RATE, warmup_steps=4)
    return keras.optimizers.SGD(schedule)


def in_numpy(run, exchanges, rate):
    """Returns the global weights, and the divergence at each exchange, given the steps of the exchanges."""
    whole = run.start.copy()
    local, divergences = [whole.copy() for _ in range(REPLICAS)], []
    for step in range(STEPS):
        local = [w - rate(step) * run.gradient(step, r, w) for r, w in enumerate(local)]
        if step + 1 in exchanges:
            whole = np.average(local, axis=0, weights=ROWS)
            squares = [np.linalg.norm(w - whole) ** 2 for w in local]
            divergences.append(np.sqrt(np.average(squares, weights=ROWS)) / np.linalg.norm(whole))
            local = [whole.copy() for _ in range(REPLICAS)]
    return np.average(local, axis=0, weights=ROWS), divergences


def exchanges_of(first, records):
    """Returns the steps of the exchanges, and the period in force after each step, from the records of a run."""
    periods = [record["sync_period"] for record in records]
    found, last, period = [], 0, first
    for step, recorded in enumerate(periods, 1):
        if step == last + period:
            found.append(step)
            last, period = step, recorded
        assert recorded == period  # changes only at an exchange
    return found


def test_adacomm(mirrored3):
    run = Regression(mirrored3, "adaptive(rule=adacomm, period=6, interval=6)")
    records = run.fit(STEPS).records
    exchanges = exchanges_of(6, records)
    losses = [record["loss"] for record in records]
    period, decided, wanted = 6, 0, []
    for step in exchanges:
        if step - decided >= 6:
            found = math.ceil(math.sqrt(np.mean(losses[decided:step]) / losses[0]) * 6)
            period, decided = (math.ceil(period / 2) if found >= period else found), step
        wanted.append(period)
    assert [records[step - 1]["sync_period"] for step in exchanges] == wanted
    assert 1 <= wanted[-1] < wanted[0] <= 6
    assert_close(run.evaluated(), in_numpy(run, exchanges, lambda step: RATE)[0])


def test_qsr(mirrored3):
    run = Regression(mirrored3, "adaptive(rule=qsr, period=2, alpha=0.15)", falling)
    records = run.fit(STEPS).records
    exchanges = exchanges_of(2, records)
    wanted = [max(2, math.floor((0.15 / rate_of_falling(step)) ** 2)) for step in exchanges]
    assert [records[step - 1]["sync_period"] for step in exchanges] == wanted
    assert wanted[-1] > wanted[0]
    assert_close(run.evaluated(), in_numpy(run, exchanges, rate_of_falling)[0])


@pytest.mark.full
def test_qsr_begins_with_the_shortest_period_in_a_warmup(mirrored3):
    run = Regression(mirrored3, "adaptive(rule=qsr, period=2, alpha=0.15)", warmup)
    records = run.fit(STEPS).records
    assert [record["sync_period"] for record in records[:6]] == [2] * 6
    assert records[-1]["sync_period"] > 2


def test_divergence(mirrored3):
    run = Regression(mirrored3, "adaptive(rule=divergence, period=2, target=0.05)")
    records = run.fit(STEPS).records
    exchanges = exchanges_of(2, records)
    whole, divergences = in_numpy(run, exchanges, lambda step: RATE)
    assert_close(run.evaluated(), whole)
    assert [records[step - 1]["replica_divergence"] for step in exchanges] == pytest.approx(divergences, rel=1e-9)
    period = 2
    for step, divergence in zip(exchanges, divergences, strict=True):
        square = (divergence / 0.05) ** 2
        period = max(1, period + (square < 0.7) - (square > 1.3))
        assert records[step - 1]["sync_period"] == period
    assert len({record["sync_period"] for record in records}) > 1


@pytest.mark.full
def test_a_period_of_one_is_local_sgd(mirrored3):
    run = Regression(mirrored3, "adaptive(rule=adacomm, period=1)")
    plain = Regression(mirrored3, "every_step")
    for each in (run, plain):
        each.fit(6)
    assert_close(run.evaluated(), plain.evaluated())


@pytest.mark.full
def test_two_fits_are_one(mirrored3):
    assert_two_fits_are_one(mirrored3, "adaptive(rule=divergence, period=3, target=0.05)", 5, 9)
