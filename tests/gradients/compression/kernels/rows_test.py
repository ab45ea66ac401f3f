"""Gram-Schmidt orthonormalization of all kinds of rows; reductions of rows, compared with NumPy."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.gradients.compression.random_draws import orthonormalize
from tfdist.gradients.compression.sparse_vector import peaks, sums


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 6),
    st.integers(6, 60),
    st.integers(0, 6),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    st.sampled_from(["float32", "float64"]),
    st.integers(0, 99),
)
def test_orthonormal_with_the_same_span(rows, columns, rank, scale, dtype, seed):
    random = np.random.default_rng(seed)
    given_rows = random.standard_normal((rows, rank)) @ random.standard_normal((rank, columns)) * scale
    given_rows = given_rows.astype(dtype)
    found = orthonormalize(tf.constant(given_rows)).numpy().astype("float64")
    kept = np.any(found != 0, axis=1)
    np.testing.assert_allclose(found @ found.T, np.diag(kept), atol=1e-5 if dtype == "float32" else 1e-13)
    assert kept[: min(rows, rank)].all() and (dtype == "float32" or kept.sum() == min(rows, rank))
    unit = given_rows.astype("float64") / scale
    np.testing.assert_allclose(unit @ found.T @ found, unit, atol=1e-3 if dtype == "float32" else 1e-11)


@pytest.mark.parametrize("value", [0.0, 1e-45, -1e-42, 3e38])
def test_rows_of_one_value(value):
    found = orthonormalize(tf.fill([3, 20], tf.constant(value, tf.float32))).numpy()
    assert np.isfinite(found).all() and not found[1:].any()
    np.testing.assert_allclose(found[0], np.sign(value) / np.sqrt(20) if abs(value) > 1e-30 else 0, rtol=1e-6)


WIDTHS = [1, 15, 16, 127, 128, 129, 300, 1024]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.sampled_from(WIDTHS), st.integers(0, 2**32 - 1))
def test_reductions_against_numpy(count, width, seed):
    rows = np.random.default_rng(seed).standard_normal((count, width)).astype("float32")
    np.testing.assert_array_equal(peaks(tf.constant(rows)), np.abs(rows).max(1))
    np.testing.assert_allclose(sums(tf.constant(rows)), rows.sum(1, dtype="float64"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("jit_compile", [False, True], ids=["plain", "XLA"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_inf_and_nan_show_in_reductions(bad, jit_compile):
    width = 300
    function = tf.function(peaks, jit_compile=jit_compile, autograph=False)
    rows = np.full((width, width), 3e38, "float32")
    rows[range(width), range(width)] = bad
    found = function(tf.constant(rows)).numpy()
    assert not np.isfinite(found).any()
    assert np.isnan(found).all() == np.isnan(bad)
    assert np.isfinite(function(tf.fill([width, width], 3e38))).all(), "the largest numbers are finite"
