"""TernGrad: three values, unbiased, with the stated variance."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tfdist.errors import InputError
from tfdist.gradients.compression.methods.terngrad import TernGrad

SEED = tf.constant([5, 6])


def coded(codec, x, seed=SEED):
    code = codec.encode(tf.constant(x), seed)
    assert sum(part.shape.num_elements() * part.dtype.size for part in code) == codec.payload_bytes(x.size)
    return codec.decode(code, x.size).numpy().astype("float64")


@settings(deadline=None, max_examples=60)
@given(arrays("float32", st.integers(1, 60), elements=st.floats(-(2.0**100), 2.0**100, width=32)))
@example(np.zeros(9, "float32"))
@example(np.array([3e38, -3e38, 1], "float32"))
@example(np.array([1e-45], "float32"))
def test_three_values_of_the_right_sign(x):
    scale = np.abs(x).max() if np.abs(x).max() >= 2.0**-126 else 0.0
    found = coded(TernGrad(), x)
    assert set(np.abs(found)) <= {0.0, float(scale)}
    assert (np.sign(found) * np.sign(x) >= 0).all()
    assert (np.abs(found[np.abs(x) == scale]) == scale).all(), "the largest is always sent"


def test_mean_and_variance():
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


def test_a_clip_beyond_the_largest_changes_nothing():
    x = np.random.default_rng(0).standard_normal(1000).astype("float32")
    np.testing.assert_allclose(coded(TernGrad(clip=1e6), x), coded(TernGrad(), x))
    assert (coded(TernGrad(clip=2.5), x * 0) == 0).all()


def test_two_bits_an_element():
    assert TernGrad().payload_bytes(8_388_608) == 8_388_608 // 4 + 4
    assert TernGrad(clip=1).payload_bytes(1) == 2 + 4


@pytest.mark.parametrize("clip", [0, -1.0, float("inf"), float("nan"), True, "2.5"])
def test_bad_clip(clip):
    with pytest.raises(InputError, match=r"terngrad needs a finite clip above 0\. Received: .*Leave it out"):
        TernGrad(clip=clip)
