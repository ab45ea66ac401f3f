"""The learning rate: scaling, warmup and decay, as a function of the step only."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers.comparisons import rates
from tfdist.optimizers import WarmupAndDecay, make_learning_rate


@pytest.mark.parametrize(
    ("scaling", "expected"), [("none", 0.1), ("linear", 1.6), ("sqrt", 0.4)], ids=["none", "linear", "sqrt"]
)
def test_a_batch_16_times_as_large(scaling, expected):
    rate = make_learning_rate(0.1, scaling=scaling, base_batch_size=64, batch_size=1024)
    assert type(rate) is float
    assert rate == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("given", [{}, {"warmup_start": 0.5}, {"warmup_steps": 5, "warmup_start": 1.0}], ids=str)
def test_a_constant_rate_is_a_float(given):
    assert make_learning_rate(0.1, **given) == 0.1


COSINE = [2.0 * (0.1 + 0.9 * (1 + math.cos(math.pi * part)) / 2) for part in (0, 0.25, 0.5, 1, 1)]
HALVED = [0.0, 0.5, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]


@pytest.mark.parametrize(
    ("peak", "given", "steps", "expected"),
    [
        (2.0, {"warmup_steps": 4, "warmup_start": 0.25}, range(7), [0.5, 0.875, 1.25, 1.625, 2.0, 2.0, 2.0]),
        (2.0, {"warmup_steps": 10, "decay": "cosine(to=0.1)", "total_steps": 50}, (10, 20, 30, 50, 70), COSINE),
        (
            2.0,
            {"warmup_steps": 10, "decay": "linear(to=0.5)", "total_steps": 50},
            (0, 5, 10, 30, 50, 70),
            [0, 1, 2, 1.5, 1, 1],
        ),
        (1.0, {"warmup_steps": 2, "decay": "step(every=3, factor=0.5)"}, range(10), HALVED),
        (1.0, {"decay": "step(every=3, factor=0.3)"}, (2, 3, 6), [1, 0.3, 0.09]),
    ],
)
def test_the_warm_up_is_a_line_from_which_the_rate_falls(peak, given, steps, expected, float64):
    np.testing.assert_allclose(rates(make_learning_rate(peak, **given), steps), expected, rtol=1e-14)


@pytest.mark.parametrize("start", [0.0, 0.1, 0.3, 1 / 16])
def test_after_the_warm_up_the_rate_is_the_peak_exactly(start):
    schedule = WarmupAndDecay(0.7, warmup_steps=3, warmup_start=start)
    assert rates(schedule, (3, 4, 10**6)) == [float(np.float32(0.7))] * 3


def test_step_falls_at_the_right_step_of_a_long_run():
    schedule = make_learning_rate(1.0, decay="step(every=3, factor=0.5)")
    assert schedule(tf.constant(3 * 10 - 1, tf.int64)) == 0.5**9
    everlasting = make_learning_rate(1.0, decay=f"step(every={2**26 + 1}, factor=0.5)")  # float32 has no such step
    assert rates(everlasting, (2**26, 2**26 + 1)) == [1.0, 0.5]


@pytest.mark.parametrize("kind", [int, np.int64, tf.constant, lambda n: tf.constant(n, tf.int64)])
def test_takes_steps_of_any_kind_in_and_outside_of_graphs(kind):
    schedule = WarmupAndDecay(1.0, warmup_steps=8, decay="cosine", total_steps=20)
    assert schedule(kind(4)).dtype == tf.float32
    assert float(tf.function(schedule)(kind(4))) == float(schedule(kind(4))) == 0.5


@pytest.mark.parametrize(
    ("decay", "warmup"),
    [
        *((decay, 5) for decay in ("none", "cosine(to=0.1)", "linear", "step(every=7, factor=0.3)")),
        *((decay, 0) for decay in ("cosine_restarts(first=4)", "exponential", "polynomial(power=2)")),
        ("one_cycle(anneal=linear)", 0),
    ],
)
def test_a_loaded_schedule_has_the_same_rates(decay, warmup):
    given = {"warmup_steps": warmup, "warmup_start": 0.1} if warmup else {}
    schedule = WarmupAndDecay(0.3, decay=decay, total_steps=20, **given)
    config = keras.optimizers.schedules.serialize(schedule)
    loaded = keras.optimizers.schedules.deserialize(config)
    assert type(loaded) is WarmupAndDecay
    assert rates(loaded, range(25)) == rates(schedule, range(25))


def test_an_optimizer_counts_its_steps_on_every_replica(train, mirrored2, float64):
    made = []

    def make():
        made.append(keras.optimizers.SGD(WarmupAndDecay(1.0, warmup_steps=20)))
        return made[-1]

    train(mirrored2, make)
    assert float(made[0].learning_rate) == 0.5, "10 steps were made"
