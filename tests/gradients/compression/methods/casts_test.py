"""Casts: their stated bounds, rounding of ties, and values above 65504."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.collectives import threads
from tests.gradients.compression.reducers import SEED, coded, named
from tfdist.gradients.compression.methods.casts import BF16, FP16


def floats(largest):
    return arrays("float32", st.integers(1, 50), elements=st.floats(-largest, largest, width=32))


@settings(deadline=None)
@given(floats(65504))
@example(np.array([65504, 65519.996, -(2.0**-14), 2.0**-24, 1e-8, 1e-45, 0], "float32"))
def test_fp16_bound(x):
    error = np.abs(coded(FP16(), x) - x)
    assert (error <= np.where(np.abs(x) >= 2.0**-14, 2.0**-11 * np.abs(x), 2.0**-25)).all()


@settings(deadline=None)
@given(floats(2.0**127))
@example(np.array([3.38e38, 1.2e-38, 1e-45, 0], "float32"))
def test_bf16_bound(x):
    normal = np.abs(x) >= 2.0**-126
    error = np.abs(coded(BF16(), x) - x)
    assert (error[normal] <= 2.0**-8 * np.abs(x[normal])).all()
    assert (error[~normal] <= 2.0**-126).all()


@pytest.mark.parametrize(("codec", "step"), [(FP16(), 2.0**-10), (BF16(), 2.0**-7)])
def test_ties_go_to_even(codec, step):
    ties = np.array([1 + step / 2, 1 + 3 * step / 2, -1 - step / 2], "float32")
    np.testing.assert_array_equal(coded(codec, ties), [1, 1 + 2 * step, -1])


@pytest.mark.parametrize(("codec", "largest", "over"), [(FP16(), 65504, 65520), (BF16(), 3.38e38, 3.4e38)])
def test_what_becomes_inf_shows_in_the_check(codec, largest, over):
    for value, finite in ((largest, True), (-largest, True), (over, False), (-over, False)):
        x = tf.constant([1.0, value, 2.0])
        code = codec.encode(x, SEED)
        assert np.isfinite(codec.check(x, code)) == finite
        assert np.isfinite(codec.decode(code, 3)).all() == finite


def test_they_are_summed_in_float32():
    """In bfloat16, 256 + 1 is 256."""
    reducer = named("bf16")

    def step(collectives):
        return reducer.reduce([tf.constant([256.0, 1.0][collectives.rank], shape=[1])], [], collectives, name="g")

    assert [float(reduced.totals[0][0]) for reduced in threads.run(2, step)] == [257, 257]
