"""Random-k and random projection: all replicas draw the same space, and the error is orthogonal to what is sent."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gradients.compression.reducers import reduced
from tfdist.collectives import OneReplica, RecordingCollectives
from tfdist.gradients.compression.methods.random_projections import Projection, RandomK


@settings(deadline=None, max_examples=10)
@given(st.sampled_from([1, 10, 101]), st.sampled_from([0.05, 0.4, 1.0]))
def test_drawn_elements_are_sent_as_they_are(size, ratio):
    x = np.random.default_rng(0).standard_normal(size).astype("float32")
    [total], [sent], [draws], _ = reduced(RandomK(ratio=ratio), x, 0)
    k = max(1, round(ratio * size))
    assert np.count_nonzero(total) == k and draws == 1
    np.testing.assert_array_equal(total[total != 0], x[total != 0])
    np.testing.assert_array_equal(sent, total)


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([1, 10, 101, 1000]), st.sampled_from([0.05, 0.4, 0.7, 1.0]), st.integers(0, 99))
def test_an_orthogonal_projection(size, ratio, draws):
    x = np.random.default_rng(draws).standard_normal(size).astype("float32")
    reducer = Projection(ratio=ratio)
    [total], [sent], [used], _ = reduced(reducer, x, draws)
    np.testing.assert_array_equal(sent, total)
    assert used == draws + 1
    np.testing.assert_allclose(np.dot(x - total, total), 0, atol=1e-4 * (x**2).sum())
    [again], *_ = reduced(reducer, total.numpy(), draws)
    np.testing.assert_allclose(again, total, atol=1e-5, err_msg="what lies in the space is sent whole")
    if ratio == 1:
        np.testing.assert_array_equal(total, x)


def totals_of(reducer, x, count):
    step = tf.function(lambda draws: reducer.reduce([tf.constant(x)], [draws], OneReplica(), name="g").totals[0])
    return np.stack([step(tf.constant(draws)) for draws in range(count)])


@pytest.mark.parametrize("make", [RandomK, Projection])
def test_unbiased_within_a_confidence_interval(make):
    """The mean of many draws is x within 5 standard errors; random-k draws 10 x 3 elements with probability 1/3 or 1/4."""
    x = np.random.default_rng(1).standard_normal(33).astype("float32")
    reducer = make(ratio=0.3, unbiased=True)
    totals = totals_of(reducer, x, 1500)
    error = totals.std(0) / np.sqrt(len(totals))
    assert (error > 0).all() and (np.abs(totals.mean(0) - x) < 5 * error).all()
    assert not reducer.biased and make(ratio=0.3).biased
    if make is RandomK:
        np.testing.assert_allclose(((totals - x) ** 2).sum(1).mean(), (33 / 10 - 1) * (x**2).sum(), rtol=0.15)


@pytest.mark.parametrize(
    ("reducer", "factor", "tolerance"),
    [
        (RandomK(ratio=0.25), 0.75, 0.05),
        (Projection(ratio=0.25), 0.75, 0.1),
        (Projection(ratio=0.25, unbiased=True), 3.0, 0.1),
    ],
)
def test_bounds_on_average(reducer, factor, tolerance):
    x = np.random.default_rng(2).standard_normal(60).astype("float32")
    errors = ((totals_of(reducer, x, 500) - x) ** 2).sum(1)
    np.testing.assert_allclose(errors.mean(), factor * (x**2).sum(), rtol=tolerance)


@pytest.mark.parametrize("make", [RandomK, Projection])
@pytest.mark.parametrize("size", [1, 7, 1000, 50_000])
def test_payload(size, make):
    recording = RecordingCollectives(OneReplica())
    reduced(make(ratio=0.03), np.ones(size, "float32"), 0, collectives=recording)
    assert [call.operation for call in recording.calls] == ["all_reduce"]
    assert recording.payload_bytes == 4 * (max(1, round(0.03 * size)) + 1)
