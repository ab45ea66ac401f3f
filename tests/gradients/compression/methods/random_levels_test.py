"""Random rounding to levels: QSGD and TernGrad are unbiased, with at most the variance of the papers."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.gradients.compression.reducers import coded
from tfdist.gradients.compression.methods.quantization import QSGD, TernGrad


@settings(deadline=None, max_examples=60)
@given(
    arrays("float32", st.integers(1, 60), elements=st.floats(-1, 1, width=32)),
    st.integers(1, 127),
    st.floats(-120, 100),
)
@example(np.array([1], "float32"), 1, -126.0)
@example(np.zeros(3, "float32"), 4, 0.0)
def test_qsgd_sends_each_element_as_a_neighbouring_level(x, levels, exponent):
    """At any magnitude, even if squares would be inf or 0."""
    x = (x * 2.0**exponent).astype("float32")
    found = coded(QSGD(levels=levels, block=64), x)
    norm = np.linalg.norm(x.astype("float64"))
    if np.abs(x).max() >= 2.0**-126:
        units = found / norm * levels
        np.testing.assert_allclose(units, np.rint(units), atol=1e-3)
        assert (np.abs(found - x) <= norm / levels * (1 + 1e-5) + 2.0**-125).all()
        assert (np.sign(found) * np.sign(x) >= 0).all()
    else:
        assert (found == 0).all()


@pytest.mark.parametrize("levels", [1, 7, 15])
def test_mean_and_variance_of_qsgd(levels):
    """The mean of many equal blocks, and the variance bound of the theorem, min(d / s^2, sqrt(d) / s)."""
    block, count = 64, 4000
    values = np.random.default_rng(0).standard_normal(block).astype("float32")
    found = coded(QSGD(levels=levels, block=block), np.tile(values, count)).reshape(count, block)
    norm = np.linalg.norm(values)
    spread = norm / levels / 2 / np.sqrt(count)
    assert (np.abs(found.mean(0) - values) <= 5 * spread).all()
    variance = ((found - values) ** 2).sum(1).mean()
    assert variance <= min(block / levels**2, np.sqrt(block) / levels) * norm**2 * 1.02


@settings(deadline=None, max_examples=60)
@given(arrays("float32", st.integers(1, 60), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
@example(np.zeros(9, "float32"))
@example(np.array([3e38, -3e38, 1], "float32"))
@example(np.array([1e-45], "float32"))
def test_terngrad_sends_three_values_of_the_right_sign(x):
    scale = np.abs(x).max() if np.abs(x).max() >= 2.0**-126 else 0.0
    found = coded(TernGrad(), x)
    assert set(np.abs(found)) <= {0.0, float(scale)}
    assert (np.sign(found) * np.sign(x) >= 0).all()
    assert (np.abs(found[np.abs(x) == scale]) == scale).all(), "the largest is always sent"


def test_mean_and_variance_of_terngrad():
    size = 40_000
    for value in (0.0, 0.1, -0.5, 0.9):
        x = np.full(size, value, "float32")
        x[0] = 1
        found = coded(TernGrad(), x)
        spread = np.sqrt(abs(value) * (1 - abs(value)) / size)
        assert abs(found[1:].mean() - np.float32(value)) <= 5 * spread + 1e-7
        stated = np.abs(x).sum(dtype="float64") - (x.astype("float64") ** 2).sum()
        assert ((found - x) ** 2).sum() <= stated + 5 * np.sqrt(size)


def test_clipping_makes_the_scale_small_and_the_code_biased():
    x = np.random.default_rng(0).standard_normal(10_000).astype("float32")
    x[0] = 1000
    found = coded(TernGrad(clip=2.5), x)
    scale = 2.5 * np.sqrt((x.astype("float64") ** 2).mean())
    np.testing.assert_allclose(np.unique(np.abs(found)), [0, scale], rtol=1e-5)
    np.testing.assert_allclose(found[0], scale, rtol=1e-5)
    assert TernGrad(clip=2.5).biased
    assert not TernGrad().biased
