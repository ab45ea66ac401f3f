"""int8: the stated bounds for each block, and unbiased rounding."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.gradients.compression.reducers import coded
from tfdist.gradients.compression.methods.quantization import Int8

MAX_FLOAT = float(np.float32(3.4e38))
VECTORS = arrays(
    "float32",
    st.integers(1, 60),
    elements=st.floats(-MAX_FLOAT, MAX_FLOAT, width=32) | st.floats(-1, 1, width=32) | st.just(0.0),
)


def blocks(x, block):
    return [x[start : start + block].astype("float64") for start in range(0, x.size, block)]


@settings(deadline=None, max_examples=60)
@given(VECTORS, st.integers(2, 8), st.booleans())
@example(np.array([MAX_FLOAT, -MAX_FLOAT, 1], "float32"), 8, False)
@example(np.array([1e-45, 0, -1e-40], "float32"), 4, False)
@example(np.array([2.0**-126, -(2.0**-127)], "float32"), 8, True)
def test_bound(x, bits, stochastic):
    levels = 2 ** (bits - 1) - 1
    found = coded(Int8(bits=bits, block=16, stochastic=stochastic), x)
    for mine, theirs in zip(blocks(x, 16), blocks(found, 16), strict=True):
        scale = np.abs(mine).max()
        step = scale / levels * (1 if stochastic else 0.5)
        assert (np.abs(theirs - mine) <= step * (1 + 1e-5) + 2.0**-125).all()
        if scale >= 2.0**-126:
            assert np.abs(theirs).max() == scale, "the largest comes back exactly"
    assert (found[x == 0] == 0).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_stochastic_rounding_has_no_bias(bits):
    size = 40_000
    codec = Int8(bits=bits, block=size, stochastic=True)
    step = 1 / (2 ** (bits - 1) - 1)
    for value in (0.3, -0.71, 0.0, 0.004):
        x = np.full(size, value, "float32")
        x[:2] = 1, -1
        mean = coded(codec, x)[2:].mean()
        assert abs(mean - np.float32(value)) <= 5 * step / 2 / np.sqrt(size) + 1e-6


def test_another_seed_rounds_otherwise():
    codec, x = Int8(stochastic=True), np.linspace(-1, 1, 500, dtype="float32")
    np.testing.assert_array_equal(coded(codec, x), coded(codec, x))
    assert (coded(codec, x) != coded(codec, x, tf.constant([5, 7]))).mean() > 0.2


def test_the_last_block_has_noise_of_its_own():
    codec, values = Int8(block=64, stochastic=True), np.linspace(-1, 1, 63, dtype="float32")
    found = coded(codec, np.concatenate([values, values[:1], values]))
    assert (found[:63] != found[64:]).any()
