"""Routing compared with a loop over tokens, and properties that hold for any probabilities."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfdist.layers import mixture_of_experts

SIZES = st.tuples(
    st.integers(0, 2**16),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from(mixture_of_experts.OVERFLOWS),
)


def drawn(seed, groups, tokens, experts):
    random = np.random.default_rng(seed)
    scores = random.exponential(size=(groups, tokens, experts)) ** 2  # uneven, so that experts overflow
    real = (random.random((groups, tokens)) < 0.9).astype("float64")
    return scores / scores.sum(-1, keepdims=True), real


def routed(seed, groups, tokens, experts, capacity, overflow):
    """Returns the arguments of a case, and the result of `routes`."""
    probabilities, real = drawn(seed, groups, tokens, experts)
    choices = min(2, experts)
    found = mixture_of_experts.routes(tf.constant(probabilities), tf.constant(real), choices, capacity, overflow)
    return (probabilities, real, choices, capacity, overflow), found


def by_hand(probabilities, real, choices, capacity, overflow):
    """Routes in a loop: the first choices of all tokens in order, then the second ones, then the overflow."""
    groups, tokens, experts = probabilities.shape
    dispatch = np.zeros((groups, tokens, experts, capacity))
    dropped = 0
    for g in range(groups):
        load, waiting = [0] * experts, []
        for choice in range(choices):
            for t in range(tokens):
                if not real[g, t]:
                    continue
                expert = np.argsort(-probabilities[g, t], kind="stable")[choice]
                if load[expert] < capacity:
                    dispatch[g, t, expert, load[expert]] = 1
                    load[expert] += 1
                else:
                    waiting.append(t)
        for t in waiting:
            expert = int(np.argmin(load))
            if overflow == "spill" and load[expert] < capacity:
                dispatch[g, t, expert, load[expert]] = 1
                load[expert] += 1
            else:
                dropped += 1
    return dispatch, dropped


@given(SIZES)
def test_routes_are_those_of_a_loop(sizes):
    case, found = routed(*sizes)
    _, real, choices, *_ = case
    dispatch, dropped = by_hand(*case)
    np.testing.assert_array_equal(found.dispatch, dispatch)
    assert float(found.dropped) == dropped
    np.testing.assert_array_equal(found.expert_tokens, dispatch.sum((0, 1, 3)))
    assert float(tf.reduce_sum(found.expert_tokens)) + dropped == choices * real.sum()  # no token is lost or duplicated


@given(SIZES)
def test_a_place_has_one_token_and_weights_are_shares(sizes):
    (probabilities, _, choices, *_), found = routed(*sizes)
    assert np.max(np.sum(found.dispatch, axis=1)) <= 1
    served = np.sum(found.dispatch, axis=3) > 0
    total = np.sort(probabilities)[..., -choices:].sum(-1, keepdims=True) if choices > 1 else 1
    returned = np.sum(found.dispatch * found.weights[..., None], axis=3)
    np.testing.assert_allclose(returned, np.where(served, probabilities / total, 0))


@pytest.mark.parametrize(
    ("tokens", "experts", "choices", "factor", "capacity"),
    [(16, 4, 1, 1.0, 4), (16, 4, 2, 1.25, 10), (16, 4, 1, 4.0, 16), (16, 4, 2, 8.0, 16), (2, 8, 1, 1.0, 1)],
)
def test_capacity(tokens, experts, choices, factor, capacity):
    assert mixture_of_experts.expert_capacity(tokens, experts, choices, factor) == capacity


def test_an_even_load_has_a_balance_of_one_and_a_collapse_that_of_all_experts():
    even = tf.one_hot([[0, 1, 2, 3]], 4) * 0.97 + 0.0075
    assert float(mixture_of_experts.balance_loss(even, tf.ones([1, 4]))) == pytest.approx(1)
    collapsed = tf.one_hot([[2, 2, 2, 2]], 4)
    assert float(mixture_of_experts.balance_loss(collapsed, tf.ones([1, 4]))) == pytest.approx(4)


def test_padding_counts_in_no_loss():
    logits = tf.constant([[[3.0, 1.0], [0.0, 9.0]]])
    first = tf.constant([[1.0, 0.0]])
    expected = np.log(np.exp(3) + np.exp(1)) ** 2
    assert float(mixture_of_experts.z_loss(logits, first)) == pytest.approx(expected, rel=1e-6)
    probabilities = tf.nn.softmax(logits)
    expected = 2 * float(probabilities[0, 0, 0])
    assert float(mixture_of_experts.balance_loss(probabilities, first)) == pytest.approx(expected, rel=1e-6)
    assert float(mixture_of_experts.balance_loss(probabilities, first * 0)) == 0
