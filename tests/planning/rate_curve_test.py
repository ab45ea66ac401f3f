"""Smoothing, divergence and the suggestion, compared with a reference in plain Python and on curves that are known."""

import math

import numpy as np
import pytest

from tfdist.planning.rate_curve import DIVERGED, divergence, learning_rates, rates_between, smooth, smoothing


def descent(curvature, rates, start=1.0, limit=math.inf):
    """Returns the losses of gradient descent on curvature / 2 * w ** 2, one step per rate."""
    w, losses = start, []
    for rate in rates:
        losses.append(min(0.5 * curvature * w * w, limit))
        w -= rate * curvature * w
    return losses


def test_smoothing_is_a_mean_weighted_by_distance():
    losses = [3.0, 1.0, 2.0, 5.0]
    for step, value in enumerate(smooth(losses, 0.7)):
        weights = [0.7 ** abs(step - other) for other in range(4)]
        assert value == pytest.approx(sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights))
    np.testing.assert_allclose(smooth([2.0] * 9, 0.7), 2.0)
    assert [smoothing(steps) for steps in (10, 40, 100, 200)] == pytest.approx([0.5, 0.5, 0.8, 0.9])


@pytest.mark.parametrize(
    ("losses", "limit"),
    [
        ([1.0] * 5 + [0.2] * 15 + [0.4, 0.7, 1.2, 1.8, 2.0], lambda means: DIVERGED * min(means)),
        ([1.0] * 5 + [0.9] * 5 + [1.0, 1.9, 3.0, 3.5, 4.0], lambda means: 2 * 1.0),
    ],
)
def test_a_loss_diverges_when_its_running_mean_is_several_times_the_lowest_or_twice_the_first(losses, limit):
    def mean(count):
        weights = [0.8 ** (count - 1 - step) for step in range(count)]
        return sum(w * x for w, x in zip(weights, losses, strict=False)) / sum(weights)

    means = [mean(count) for count in range(1, len(losses) + 1)]
    expected = next(i for i, value in enumerate(means) if value > limit(means[: i + 1]))
    assert divergence(losses, 100) == expected
    assert divergence(losses[:expected], 100) is None


def test_a_loss_that_is_not_finite_has_diverged():
    assert divergence([1.0, math.nan], 100) == divergence([1.0, math.inf], 100) == 1
    assert divergence([], 100) is None
    assert divergence([-1.0, -2.0, -3.0, -1.0, 0.0, 5.0], 100) is None, "multiples of negative losses mean nothing"


@pytest.mark.parametrize("curvature", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_suggestion_is_a_stable_rate_that_learns(curvature, noise):
    rates = rates_between(1e-7, 1e4, 150)
    factors = 1 + noise * np.random.default_rng(0).standard_normal(len(rates))
    losses = [loss * factor for loss, factor in zip(descent(curvature, rates), factors, strict=True)]
    result = learning_rates(rates, losses, 8)
    stable = 2 / curvature  # gradient descent diverges beyond it
    assert stable / 100 < result.suggestion < stable / 2
    assert result.suggestion < result.lowest
    assert stable < result.diverged < 100 * stable
    assert result.rates[-1] < result.diverged and len(result.losses) == len(result.smoothed) == len(result.rates)


def test_one_huge_loss_before_the_divergence_does_not_change_the_suggestion():
    rates = rates_between(1e-5, 1.0, 50)
    losses = [*np.linspace(2.0, 2.0, 20), *np.linspace(1.9, 0.6, 15), 0.6, 0.7]
    without, with_it = (learning_rates(rates, [*losses, huge, math.nan], 8).suggestion for huge in (0.8, 1e9))
    assert with_it == pytest.approx(without, rel=0.5)
    assert rates[20] < with_it < rates[36]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("steps", [20, 100])
def test_noise_is_no_descent(seed, steps):
    losses = 1 + 0.1 * np.random.default_rng(seed).standard_normal(steps)
    assert learning_rates(rates_between(1e-7, 10.0, steps), losses.tolist(), 8).suggestion is None


def test_a_descent_before_losses_that_explode_without_a_divergence_is_found():
    """Losses of a search on digits, as they were."""
    before = [2.37, 2.32, 2.32, 2.34, 2.30, 2.33, 2.32, 2.27, 2.27, 2.26, 2.16, 2.06, 2.02, 1.82, 1.61]
    rates = rates_between(1e-4, 10.0, 20)
    result = learning_rates(rates, [*before, 3.07, 12.65, 9.97, 3.11, 3.34], 64)
    assert 0.02 < result.suggestion < 0.5
    assert result.lowest == rates[14] and result.diverged == rates[16]


@pytest.mark.parametrize("losses", [[1.0] * 30, list(range(1, 31)), [math.nan], [1.0, 0.9, math.inf]])
def test_without_a_descent_nothing_is_suggested(losses):
    result = learning_rates(rates_between(1e-3, 1.0, 30), losses, 8)
    assert result.suggestion is None
    assert "Try another range" in result.describe()


def test_the_text_says_what_was_found():
    rates = rates_between(1e-7, 1e4, 150)
    assert "and diverges at" in learning_rates(rates, descent(1.0, rates), 8).describe()
    rates = rates_between(1e-5, 1.0, 60)
    assert "a larger max would show where" in learning_rates(rates, descent(1.0, rates), 8).describe()
