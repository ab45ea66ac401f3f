"""Random-k: all elements are drawn with the right frequency, and all replicas draw the same ones."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.collectives import OneReplica, Recording
from tfdist.errors import InputError
from tfdist.gradients.compression.methods.randomk import RandomK, drawn


def reduced(reducer, x, draws=0, collectives=None):
    return reducer.reduce([tf.constant(x)], [tf.constant(draws)], collectives or OneReplica(), name="g")


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 500), st.sampled_from([0.01, 0.3, 0.7, 1.0]), st.integers(0, 99))
def test_drawn_elements_are_distinct(size, ratio, seed):
    k = max(1, round(ratio * size))
    indices, lengths = (part.numpy() for part in drawn(k, size, tf.constant([seed, 0])))
    assert len(set(indices)) == k and 0 <= indices.min() and indices.max() < size
    assert lengths.sum() == size and lengths.max() - lengths.min() <= 1


@settings(deadline=None, max_examples=10)
@given(st.sampled_from([1, 10, 101]), st.sampled_from([0.05, 0.4, 1.0]))
def test_what_is_sent_is_sent_as_it_is(size, ratio):
    x = np.random.default_rng(0).standard_normal(size).astype("float32")
    [total], [sent], [draws], _ = reduced(RandomK(ratio=ratio), x)
    k = max(1, round(ratio * size))
    assert np.count_nonzero(total) == k and draws == 1
    np.testing.assert_array_equal(total[total != 0], x[total != 0])
    np.testing.assert_array_equal(sent, total)


def test_unbiased_within_a_confidence_interval():
    """The mean of many draws is x within 5 standard errors, for 10 x 3 elements drawn with probability 1/3 or 1/4."""
    x = np.random.default_rng(1).standard_normal(33).astype("float32")
    reducer = RandomK(ratio=0.3, unbiased=True)
    step = tf.function(lambda draws: reducer.reduce([tf.constant(x)], [draws], OneReplica(), name="g").totals[0])
    sums = np.stack([step(tf.constant(draws)) for draws in range(1500)])
    error = sums.std(0) / np.sqrt(len(sums))
    assert (error > 0).all() and (np.abs(sums.mean(0) - x) < 5 * error).all()
    assert not reducer.biased and RandomK(ratio=0.3).biased
    expected = (33 / 10 - 1) * (x**2).sum()
    np.testing.assert_allclose(((sums - x) ** 2).sum(1).mean(), expected, rtol=0.15)


def test_bound_on_average():
    x = np.random.default_rng(2).standard_normal(60).astype("float32")
    reducer = RandomK(ratio=0.25)
    step = tf.function(lambda draws: reducer.reduce([tf.constant(x)], [draws], OneReplica(), name="g").totals[0])
    errors = [((x - step(tf.constant(draws)).numpy()) ** 2).sum() for draws in range(500)]
    np.testing.assert_allclose(np.mean(errors), 0.75 * (x**2).sum(), rtol=0.05)


@pytest.mark.parametrize("size", [1, 7, 1000, 50_000])
def test_payload(size):
    recording = Recording(OneReplica())
    reduced(RandomK(ratio=0.03), np.ones(size, "float32"), collectives=recording)
    assert [call.operation for call in recording.calls] == ["all_reduce"]
    assert recording.payload_bytes == 4 * (max(1, round(0.03 * size)) + 1)


@pytest.mark.parametrize("text", ["randomk(ratio=0.3)", "randomk(ratio=0.6, unbiased=True)"])
def test_contract(check_contract, text):
    steps = check_contract(text)
    assert [int(state[-1]) for state in steps[-1].state] == [5] * 4
    assert not np.array_equal(steps[0].totals[0][2] != 0, steps[1].totals[0][2] != 0), "each step draws anew"


@pytest.mark.parametrize("parameters", [{"ratio": 0}, {"ratio": 2}, {"ratio": None}, {"ratio": 0.1, "unbiased": 1}])
def test_bad_parameters(parameters):
    with pytest.raises(InputError, match="randomk .*Received: ") as caught:
        RandomK(**parameters)
    assert "\n" not in str(caught.value)
