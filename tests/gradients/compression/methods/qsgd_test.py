"""QSGD: unbiased, with at most the variance of the paper's theorem."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tfdist.errors import InputError
from tfdist.gradients.compression.methods.qsgd import QSGD

SEED = tf.constant([5, 6])


def coded(codec, x, seed=SEED):
    code = codec.encode(tf.constant(x), seed)
    assert sum(part.shape.num_elements() * part.dtype.size for part in code) == codec.payload_bytes(x.size)
    return codec.decode(code, x.size).numpy().astype("float64")


@settings(deadline=None, max_examples=60)
@given(
    arrays("float32", st.integers(1, 60), elements=st.floats(-1, 1, width=32)),
    st.integers(1, 127),
    st.floats(-120, 100),
)
@example(np.array([1], "float32"), 1, -126.0)
@example(np.zeros(3, "float32"), 4, 0.0)
def test_each_element_goes_to_a_neighbouring_level(x, levels, exponent):
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
def test_mean_and_variance(levels):
    """The mean of many equal blocks, and the variance bound of the theorem, min(d / s^2, sqrt(d) / s)."""
    block, count = 64, 4000
    values = np.random.default_rng(0).standard_normal(block).astype("float32")
    found = coded(QSGD(levels=levels, block=block), np.tile(values, count)).reshape(count, block)
    norm = np.linalg.norm(values)
    spread = norm / levels / 2 / np.sqrt(count)
    assert (np.abs(found.mean(0) - values) <= 5 * spread).all()
    variance = ((found - values) ** 2).sum(1).mean()
    assert variance <= min(block / levels**2, np.sqrt(block) / levels) * norm**2 * 1.02


def test_it_is_unbiased_and_random():
    codec, x = QSGD(), np.linspace(-1, 1, 500, dtype="float32")
    assert not codec.biased
    assert codec.randomized
    np.testing.assert_array_equal(coded(codec, x), coded(codec, x))
    assert (coded(codec, x) != coded(codec, x, tf.constant([5, 7]))).mean() > 0.2


@pytest.mark.parametrize(
    ("levels", "bits"), [(1, 2), (2, 3), (3, 3), (4, 4), (7, 4), (15, 5), (63, 7), (64, 8), (127, 8)]
)
def test_cost(levels, bits):
    assert QSGD(levels=levels, block=128).payload_bytes(1280) == 160 * bits + 4 * 10


@pytest.mark.parametrize("parameters", [{"levels": 0}, {"levels": 128}, {"block": 4}, {"levels": 1.5}])
def test_bad_parameters(parameters):
    [name] = parameters
    with pytest.raises(InputError, match=f"qsgd needs {name} to be .* Received: {parameters[name]}"):
        QSGD(**parameters)
