"""Learning-rate schedules by name: their values are those of Keras's own schedules, and of the equations of the papers."""

import math
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.optimizers.comparisons import rates
from tfdist.errors import InputError
from tfdist.optimizers import WarmupAndDecay, make_learning_rate

PEAK, WARMUP, TOTAL = np.float64(0.3), 7, 47  # Keras's schedules compute in float32 with Python's floats
SPAN = TOTAL - WARMUP
schedules = keras.optimizers.schedules


class WithAccurateCycles(schedules.CosineDecayRestarts):
    """Asks Keras's schedule just behind each step: at the steps where a cycle begins, its logarithm may fall short."""

    def __call__(self, step):
        return super().__call__(step + 1e-11)


@pytest.mark.parametrize(
    ("decay", "of_keras"),
    [
        ("cosine(to=0.1)", lambda: schedules.CosineDecay(PEAK, SPAN, alpha=0.1)),
        ("linear(to=0.2)", lambda: schedules.PolynomialDecay(PEAK, SPAN, 0.2 * PEAK)),
        ("polynomial", lambda: schedules.PolynomialDecay(PEAK, SPAN, 0.0)),
        ("polynomial(to=0.05, power=2.5)", lambda: schedules.PolynomialDecay(PEAK, SPAN, 0.05 * PEAK, power=2.5)),
        ("exponential(every=9, factor=0.8)", lambda: schedules.ExponentialDecay(PEAK, 9, np.float64(0.8))),
        ("exponential", lambda: schedules.ExponentialDecay(PEAK, SPAN, np.float64(0.01))),
        ("cosine_restarts(first=6)", lambda: WithAccurateCycles(PEAK, 6)),
        (
            "cosine_restarts(first=5, t_mul=1.5, m_mul=0.7, to=0.1)",
            lambda: WithAccurateCycles(PEAK, 5, t_mul=1.5, m_mul=np.float64(0.7), alpha=np.float64(0.1)),
        ),
        ("cosine_restarts(first=8, t_mul=1.0, m_mul=0.5)", lambda: WithAccurateCycles(PEAK, 8, t_mul=1.0, m_mul=0.5)),
    ],
)
def test_equals_the_schedule_of_keras_after_the_warmup(decay, of_keras, float64):
    ours = WarmupAndDecay(PEAK, warmup_steps=WARMUP, decay=decay, total_steps=TOTAL)
    np.testing.assert_allclose(
        rates(ours, range(WARMUP, TOTAL + 1)), rates(of_keras(), range(SPAN + 1)), rtol=1e-9, atol=1e-18
    )
    np.testing.assert_allclose(rates(ours, range(WARMUP)), [PEAK * step / WARMUP for step in range(WARMUP)], rtol=1e-14)


@pytest.mark.parametrize("decay", ["cosine", "linear", "polynomial(to=0.1, power=2)", "exponential", "one_cycle"])
def test_stays_where_it_is_after_the_end_of_the_run(decay, float64):
    schedule = WarmupAndDecay(PEAK, decay=decay, total_steps=TOTAL)
    assert rates(schedule, (TOTAL, TOTAL + 1, 10 * TOTAL)) == [float(schedule(TOTAL))] * 3


def test_restarts_are_at_the_steps_at_which_cycles_begin():
    schedule = WarmupAndDecay(1.0, decay="cosine_restarts(first=10, m_mul=0.5)")
    assert rates(schedule, (0, 10, 30, 70, 150)) == [1.0, 0.5, 0.25, 0.125, 0.0625]
    assert all(rate < 0.05 for rate in rates(schedule, (9, 29, 69, 149)))
    slow = WarmupAndDecay(1.0, decay="cosine_restarts(first=10, t_mul=1.1)")
    assert rates(slow, (10, 21)) == [1.0, 1.0]


@pytest.mark.parametrize("anneal", ["cosine", "linear"])
def test_one_cycle_follows_its_equations(anneal, float64):
    decay = f"one_cycle(pct_start=0.25, div_factor=10, final_div_factor=100, anneal={anneal})"
    schedule = WarmupAndDecay(PEAK, decay=decay, total_steps=40)

    def between(first, last, part):
        part = part if anneal == "linear" else (1 - math.cos(math.pi * part)) / 2
        return first + (last - first) * part

    for step in range(41):
        if step <= 10:
            rate, momentum = between(PEAK / 10, PEAK, step / 10), between(0.95, 0.85, step / 10)
        else:
            rate, momentum = between(PEAK, PEAK / 1000, (step - 10) / 30), between(0.85, 0.95, (step - 10) / 30)
        assert float(schedule(step)) == pytest.approx(rate, rel=1e-12)
        assert float(schedule.momentum(step)) == pytest.approx(momentum, rel=1e-12)


def test_plateau_is_a_constant_rate_for_the_callback():
    assert make_learning_rate(0.1, decay="plateau(patience=2)") == 0.1


@pytest.fixture
def mine(monkeypatch):
    """A module of the user's own."""
    module = types.ModuleType("mine")
    monkeypatch.setitem(sys.modules, "mine", module)
    return module


def test_a_schedule_of_the_user_s_own(mine, float64):
    seen = []

    def halving(learning_rate, total_steps, every=10):
        seen.append((learning_rate, total_steps))
        return lambda step: learning_rate * 0.5 ** (keras.ops.cast(step, "float64") / every)

    mine.halving, mine.of_keras = (
        halving,
        lambda learning_rate: schedules.ExponentialDecay(np.float64(learning_rate), 10, 0.5),
    )
    own = WarmupAndDecay(0.8, warmup_steps=4, decay="mine:halving(every=5)", total_steps=50)
    assert seen == [(0.8, 50)]
    np.testing.assert_allclose(rates(own, (0, 2, 5, 10)), [0, 0.8 * 0.5**0.4 / 2, 0.4, 0.2], rtol=1e-12)
    np.testing.assert_allclose(rates(WarmupAndDecay(0.8, decay="mine:of_keras"), (0, 10)), [0.8, 0.4], rtol=1e-12)


def test_a_schedule_of_the_user_s_own_may_compare_the_step_in_a_graph(mine, float64):
    def steps(step):
        if step < 5:
            return 0.5
        return 0.25

    mine.steps = lambda: steps
    own = WarmupAndDecay(1.0, decay="mine:steps")
    rate = tf.function(lambda step: own(step), autograph=False)
    assert [float(rate(tf.constant(step, tf.int64))) for step in (0, 4, 5)] == [0.5, 0.5, 0.25]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (lambda: None, "Received: NoneType."),
        (lambda: 0.1, "Received: float."),
        (lambda: lambda step: "fast", "Received: 'fast' for step 0."),
        (lambda: lambda step: math.nan, "Received: nan for step 0."),
        (lambda: lambda step: 1 / step, "must not fail. Received: ZeroDivisionError: division by zero"),
    ],
)
def test_a_schedule_of_the_user_s_own_must_give_rates(own, message, mine):
    mine.own = own
    with pytest.raises(InputError) as caught:
        WarmupAndDecay(0.1, decay="mine:own")
    assert message in str(caught.value) and "--decay=mine:own" in str(caught.value)
