"""Row reductions compared with NumPy, including inf and NaN at any position."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.gradients.compression.kernels.row_reductions import bounds, peaks, sums

WIDTHS = [1, 15, 16, 127, 128, 129, 300, 1024]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.sampled_from(WIDTHS), st.integers(0, 2**32 - 1))
def test_against_numpy(count, width, seed):
    rows = np.random.default_rng(seed).standard_normal((count, width)).astype("float32")
    np.testing.assert_array_equal(peaks(tf.constant(rows)), np.abs(rows).max(1))
    np.testing.assert_array_equal(bounds(tf.constant(rows)), [rows.min(1), rows.max(1)])
    np.testing.assert_allclose(sums(tf.constant(rows)), rows.sum(1, dtype="float64"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_peaks_have_the_dtype_of_the_rows(dtype):
    rows = tf.cast([[1.0, -3.0], [0.0, 0.0]], dtype)
    assert peaks(rows).dtype == rows.dtype
    np.testing.assert_array_equal(tf.cast(peaks(rows), tf.float32), [3, 0])


@pytest.mark.parametrize("jit_compile", [False, True], ids=["plain", "XLA"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_inf_and_nan_show(bad, jit_compile):
    width = 300
    function = tf.function(peaks, jit_compile=jit_compile, autograph=False)
    rows = np.full((width, width), 3e38, "float32")
    rows[range(width), range(width)] = bad
    found = function(tf.constant(rows)).numpy()
    assert not np.isfinite(found).any()
    assert np.isnan(found).all() == np.isnan(bad)
    assert np.isfinite(function(tf.fill([width, width], 3e38))).all(), "the largest numbers are finite"
    low, high = tf.function(bounds, jit_compile=jit_compile, autograph=False)(tf.constant(rows))
    assert not (np.isfinite(low) & np.isfinite(high)).any()
