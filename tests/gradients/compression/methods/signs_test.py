"""Signs: the error of 1-bit equals its formula; signSGD has the sign of the majority on every replica, and no drift."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.collectives import threads
from tests.gradients.compression.reducers import coded, reduced
from tfdist.gradients.compression.methods.quantization import OneBit, SignSGD


@settings(deadline=None, max_examples=60)
@given(arrays("float32", st.integers(1, 60), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
@example(np.zeros(9, "float32"))
@example(np.full(40, 3e38, "float32"))
def test_onebit_sends_signs_and_mean_magnitudes(x):
    found = coded(OneBit(block=16), x)
    x = np.where(np.abs(x) < 2.0**-126, 0, x)  # denormals count as zero
    for start in range(0, x.size, 16):
        mine, theirs = (values[start : start + 16].astype("float64") for values in (x, found))
        mean = np.abs(mine).mean()
        np.testing.assert_allclose(theirs, np.where(mine < 0, -mean, mean), rtol=1e-5, atol=2.0**-120)
        error, stated = ((mine - theirs) ** 2).sum(), (mine**2).sum() - np.abs(mine).sum() ** 2 / mine.size
        np.testing.assert_allclose(error, stated, rtol=1e-4, atol=1e-5 * (mine**2).sum() + 1e-70)


def reduce_each(values):
    return threads.run(len(values), lambda c: reduced(SignSGD(), values[c.rank], 0, collectives=c))


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_the_majority_decides(replicas):
    values = np.random.default_rng(0).standard_normal((replicas, 101)).astype("float32")
    found = reduce_each(values)
    for one in found:
        np.testing.assert_array_equal(one.totals[0], np.sign(np.sign(values).sum(0)))
    np.testing.assert_allclose(sum(one.sent[0] for one in found), found[0].totals[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "total"),
    [
        ([[1e-30, -5, 1e30], [1e-20, 7, 1], [-3, -1e-10, -1]], [1, -1, 1]),  # their size does not matter
        ([[1.0, -2.0], [-3.0, 4.0]], [0, 0]),  # ties
    ],
)
def test_each_replica_has_one_vote(values, total):
    np.testing.assert_array_equal(reduce_each(np.array(values, "float32"))[0].totals[0], total)


def test_zeros_vote_by_a_coin_for_each_step_and_replica():
    reducer, zeros = SignSGD(), tf.zeros([9])

    def total(draws):
        return reduced(reducer, zeros, draws).totals[0].numpy()

    totals = [total(draws) for draws in range(100)]
    assert all(abs(vector.sum()) == 9 for vector in totals), "alike in a step"
    assert abs(sum(vector[0] for vector in totals)) < 5 * np.sqrt(100)
    np.testing.assert_array_equal([total(draws) for draws in range(3)], totals[:3])
