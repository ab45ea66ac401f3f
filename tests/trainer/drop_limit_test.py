"""The limit after which micro-steps are dropped is the one that maximizes the rows per second."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.trainer.drop_limit import LEAST_GAIN, MOST_DROPPED, fastest_limit


def ends(seconds) -> np.ndarray:
    return np.cumsum(np.asarray(seconds, float), axis=-1)


def simulated(times: np.ndarray, other: float, limit: float) -> tuple[int, float]:
    """Returns the micro-steps and the seconds of all steps with a limit, as ranks would compute them one by one."""
    computed, seconds = 0, 0.0
    for ranks in times:
        slowest = 0.0
        for micro_steps in ranks:
            count, now = 0, 0.0
            while count < len(micro_steps) and (count == 0 or now < limit):
                now, count = micro_steps[count], count + 1
            computed, slowest = computed + count, max(slowest, now)
        seconds += slowest + other
    return computed, seconds


def test_a_step_that_is_rarely_late_ends_early():
    seconds = np.full((100, 4, 4), 0.1)
    seconds[::10, 2] = 1.0  # in a tenth of the steps, one rank takes 4 instead of 0.4 s
    found = fastest_limit(ends(seconds), other=0.1)
    assert found is not None
    assert found.seconds == 1.0, "the largest of the limits that gain equally much"
    assert found.dropped == pytest.approx(30 / 1600)
    computed, total = simulated(ends(seconds), 0.1, found.seconds)
    assert found.gain == pytest.approx((computed / total) / (1600 / (90 * 0.5 + 10 * 4.1)) - 1)


@pytest.mark.parametrize(
    "seconds",
    [
        np.full((20, 4, 4), 0.1),  # all are equal
        np.full((20, 4, 4), 0.1) * [[[1], [1], [1], [1.02]]],  # hardly late
        np.full((20, 2, 4), 0.1) * [[[1], [4]]],  # always late: all of its rows would have to be dropped
    ],
)
def test_nothing_is_dropped_that_gains_nothing_or_costs_too_much(seconds):
    assert fastest_limit(ends(seconds), other=0.1) is None


@given(st.lists(st.floats(0.01, 10), min_size=2 * 2 * 3, max_size=2 * 2 * 3), st.floats(0, 5))
def test_no_other_limit_is_much_faster(seconds, other):
    times = ends(np.reshape(seconds, (2, 2, 3)))
    found = fastest_limit(times, other)
    whole = 12 / simulated(times, other, np.inf)[1]
    speeds = {}
    for limit in {float(x) for x in itertools.chain(times.flat)}:
        computed, total = simulated(times, other, limit)
        speeds[limit] = (computed / total / whole - 1, 1 - computed / 12)
    allowed = [gain for gain, dropped in speeds.values() if dropped <= MOST_DROPPED and gain >= LEAST_GAIN + 1e-9]
    if found is None:
        assert not allowed
    else:
        assert found.gain >= 0.9 * max([*allowed, found.gain]) - 1e-9
        assert found.gain == pytest.approx(speeds[found.seconds][0])
