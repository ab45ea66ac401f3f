"""The rules of `adaptive`: their equations, bounds and state."""

import math

import pytest

from tfdist.grammar.sync import Adaptive
from tfdist.synchronization.period_rules import RULES, AtExchange


def made(**sync):
    return RULES[sync["rule"]](Adaptive(**sync))


def at(step, rate=0.1, rising=False, divergence=0.01):
    return AtExchange(step, rate, rising, divergence)


def test_adacomm_follows_the_root_of_the_loss():
    rule = made(rule="adacomm", period=20, interval=40)
    rule.decide(at(0, divergence=None))
    rule.observe([4.0, *[2.0] * 39])
    rule.decide(at(20))
    assert rule.period == 20  # within the interval
    rule.decide(at(40))
    assert rule.period == math.ceil(math.sqrt(82 / 40 / 4.0) * 20) == 15
    rule.observe([1.0] * 45)
    rule.decide(at(85))
    assert rule.period == 10


def test_adacomm_halves_the_period_where_the_loss_no_longer_falls():
    rule = made(rule="adacomm", period=9, interval=1)
    rule.decide(at(0, divergence=None))
    periods = []
    for step in range(5):
        rule.observe([1.0])
        rule.decide(at(step + 1))
        periods.append(rule.period)
    assert periods == [5, 3, 2, 1, 1]


def test_adacomm_lengthens_the_period_when_the_rate_falls():
    rule = made(rule="adacomm", period=8, interval=1)
    rule.decide(at(0, divergence=None))
    rule.observe([4.0])
    rule.decide(at(1, rate=0.01))
    assert rule.period == math.ceil(math.sqrt(10) * 8) == 26


@pytest.mark.parametrize("losses", [[-1.0], [0.0], [1.0, -5.0], []])
def test_adacomm_needs_positive_losses(losses):
    rule = made(rule="adacomm", period=8, interval=1)
    rule.decide(at(0, divergence=None))
    rule.observe(losses)
    rule.decide(at(1))
    assert rule.period == 8


@pytest.mark.parametrize(
    ("rate", "period"), [(0.8, 4), (0.1, 4), (0.09, 4), (0.05, 16), (0.04, 25), (1e-9, 500), (0.0, 500)]
)
def test_qsr(rate, period):
    rule = made(rule="qsr", period=4, alpha=0.2, max_period=500)
    rule.decide(at(10, rate=rate))
    assert rule.period == period


def test_qsr_uses_the_shortest_period_while_the_rate_rises():
    rule = made(rule="qsr", period=4, alpha=0.2)
    rule.decide(at(0, rate=0.001, rising=True, divergence=None))
    assert rule.period == 4
    rule.decide(at(4, rate=0.01))
    assert rule.period == 4  # it has risen
    rule.decide(at(8, rate=0.01))
    assert rule.period == 400


def test_divergence_holds_a_target():
    rule = made(rule="divergence", period=4, target=0.1, max_period=6)
    rule.decide(at(0, divergence=None))
    found = []
    for divergence in (0.01, 0.09, 0.083, 0.01, 0.01, 0.12, 1, 1, 1, 1, 1, 1):
        rule.decide(at(1, divergence=divergence))
        found.append(rule.period)
    assert found == [5, 5, 6, 6, 6, 5, 4, 3, 2, 1, 1, 1]


def test_divergence_learns_its_target_in_proportion_to_the_rate():
    rule = made(rule="divergence", period=4)
    rule.decide(at(0, divergence=None))
    for step in range(10):
        rule.decide(at(step, divergence=0.1))
        assert rule.period == 4
    rule.decide(at(11, divergence=0.1, rate=0.01))
    assert rule.period == 4
    rule.decide(at(12, divergence=0.1, rate=0.01))  # the square should be a tenth now
    assert rule.period == 3
    rule.decide(at(13, divergence=math.sqrt(0.001), rate=0.01))
    assert rule.period == 3
    rule.decide(at(14, divergence=0.02, rate=0.01))
    assert rule.period == 4


@pytest.mark.parametrize(
    "sync",
    [
        {"rule": "adacomm", "interval": 3},
        {"rule": "qsr", "alpha": 0.3},
        {"rule": "divergence"},
        {"rule": "divergence", "target": 0.02},
    ],
)
def test_a_restored_rule_goes_on(sync):
    whole, parts = made(**sync), made(**sync)

    def go_on(rule, begin, end):
        for step in range(begin, end):
            rule.observe([10 / (step + 1)])
            rule.decide(at(step, rate=0.1 / (1 + step // 7), divergence=None if not step else 0.1 / (step + 1)))

    go_on(whole, 0, 40)
    go_on(parts, 0, 9)
    again = made(**sync)
    again.restore(parts.to_json())
    go_on(again, 9, 40)
    assert again.to_json() == whole.to_json()
    assert again.period != Adaptive(**sync).period
