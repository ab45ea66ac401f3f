"""Random projection: S^T S is the identity on average, and the error is orthogonal to what is sent."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.collectives import OneReplica, Recording
from tfdist.errors import InputError
from tfdist.gradients.compression.methods.projection import Projection


def reduced(reducer, x, draws=0, collectives=None):
    return reducer.reduce([tf.constant(x)], [tf.constant(draws)], collectives or OneReplica(), name="g")


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


def draw(reducer, x, count):
    step = tf.function(lambda draws: reducer.reduce([tf.constant(x)], [draws], OneReplica(), name="g").totals[0])
    return np.stack([step(tf.constant(draws)) for draws in range(count)])


def test_unbiased_within_a_confidence_interval():
    x = np.random.default_rng(1).standard_normal(33).astype("float32")
    reducer = Projection(ratio=0.3, unbiased=True)
    totals = draw(reducer, x, 1500)
    error = totals.std(0) / np.sqrt(len(totals))
    assert (error > 0).all() and (np.abs(totals.mean(0) - x) < 5 * error).all()
    assert not reducer.biased and Projection(ratio=0.3).biased


def test_bounds_on_average():
    x = np.random.default_rng(2).standard_normal(60).astype("float32")
    for unbiased, factor in ((False, 0.75), (True, 3.0)):
        errors = ((draw(Projection(ratio=0.25, unbiased=unbiased), x, 500) - x) ** 2).sum(1)
        np.testing.assert_allclose(errors.mean(), factor * (x**2).sum(), rtol=0.1)


@pytest.mark.parametrize("size", [1, 7, 1000, 50_000])
def test_payload(size):
    recording = Recording(OneReplica())
    reduced(Projection(ratio=0.03), np.ones(size, "float32"), collectives=recording)
    assert [call.operation for call in recording.calls] == ["all_reduce"]
    assert recording.payload_bytes == 4 * (max(1, round(0.03 * size)) + 1)


def test_contract(check_contract):
    steps = check_contract("projection(ratio=0.3)")
    assert [int(state[-1]) for state in steps[-1].state] == [5] * 4
    assert not np.array_equal(steps[0].totals[0][2], steps[1].totals[0][2]), "each step draws anew"


@pytest.mark.parametrize("parameters", [{"ratio": 0}, {"ratio": 2}, {"ratio": None}, {"ratio": 0.1, "unbiased": 1}])
def test_bad_parameters(parameters):
    with pytest.raises(InputError, match="projection .*Received: ") as caught:
        Projection(**parameters)
    assert "\n" not in str(caught.value)
