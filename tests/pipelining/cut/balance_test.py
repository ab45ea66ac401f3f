import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.pipelining.cut_points import SLACK, balance


def additive(single):
    total = np.concatenate([[0.0], np.cumsum(single)])
    return total[None, :] - total[:, None]


def highest(costs, cuts):
    return max(costs[i, j] for i, j in itertools.pairwise([0, *cuts, len(costs) - 1]))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=8),
    st.lists(st.integers(0, 9), min_size=8, max_size=8),
    st.lists(st.booleans(), min_size=8, max_size=8),
    st.integers(1, 4),
)
def test_the_balance_is_the_best_of_all(single, sizes, free, stages):
    n = len(single)
    crossing, allowed = np.array([0, *sizes[:n]], float), np.array([False, *free[: n - 1], False])
    costs = additive(single)
    choices = [found for found in itertools.combinations(range(1, n), stages - 1) if allowed[list(found)].all()]
    found = balance(costs, stages, crossing, allowed)
    if not choices:
        assert found is None
        return
    least = min(highest(costs, choice) for choice in choices)
    near = [choice for choice in choices if highest(costs, choice) <= least * (1 + SLACK)]
    assert tuple(found) in near
    assert crossing[found].sum() == min(crossing[list(choice)].sum() for choice in near)


def test_costs_that_are_not_sums_count_each_variable_once():
    costs = np.array([[0, 5, 5, 6], [0, 0, 5, 6], [0, 0, 0, 1], [0, 0, 0, 0.0]])  # elements 0 and 1 share 5
    assert balance(costs, 2, np.zeros(4), np.ones(4, bool)) in ([1], [2])
    assert highest(costs, [2]) == 5


@pytest.mark.parametrize("stages", [1, 2, 20])
def test_long_sequences_take_no_time(stages):
    found = balance(additive([1] * 300), stages, np.zeros(301), np.ones(301, bool))
    assert len(found) == stages - 1 and highest(additive([1] * 300), found) == 300 / stages
