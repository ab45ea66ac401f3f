"""The largest elements: top-k by sampled and exact search, its unused slots and values, and all that reach a threshold."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gradients.compression.reducers import SEED, code_bytes, reduced
from tests.gradients.replicas import Runner
from tfdist.collectives import OneReplica, RecordingCollectives
from tfdist.gradients.compression import Codec
from tfdist.gradients.compression.methods.sparsification import Threshold, TopK

TINY = float(np.finfo("float32").tiny)  # below it arithmetic may flush to zero
SCALES = st.sampled_from([1e-40, 1e-20, 1.0, 1e20])


def with_code(codec, x, seed=SEED):
    code = codec.encode(tf.constant(x), seed)
    return codec.decode(code, len(x)).numpy().astype("float64"), code


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([1, 2, 63, 300]), st.sampled_from([0.01, 0.1, 0.5, 1.0]), SCALES, st.booleans(), st.integers(0, 99)
)
def test_bound_of_topk(size, ratio, scale, sparse, seed):
    random = np.random.default_rng(seed)
    x = (random.standard_normal(size) * scale * (random.random(size) < (0.1 if sparse else 1))).astype("float32")
    for method in ("exact", "sampled"):
        y, code = with_code(TopK(ratio=ratio, method=method), x)
        k = max(1, round(ratio * size))
        assert [(part.shape, part.dtype) for part in code] == [((k,), tf.int32), ((k,), tf.float32)]
        exact = x.astype("float64")
        assert ((exact - y) ** 2).sum() <= (1 - k / size) * (exact**2).sum() * (1 + 1e-6) + size * TINY**2
        np.testing.assert_allclose(np.sort(np.abs(y))[size - k :], np.sort(np.abs(exact))[size - k :], 0, TINY)
        assert (exact[y != 0] == y[y != 0]).all(), "what is sent is sent as it is"


@pytest.mark.parametrize("size", [160_000, 160_003])
def test_the_sampled_search_finds_what_the_exact_one_does(size):
    x = np.random.default_rng(1).standard_normal(size).astype("float32")
    for ratio in (0.05, 0.2):
        exact, _ = with_code(TopK(ratio=ratio), x)
        for seed in range(3):
            sampled, _ = with_code(TopK(ratio=ratio, method="sampled"), x, tf.constant([seed, 0]))
            np.testing.assert_array_equal(sampled, exact)


def test_a_threshold_that_too_few_reach_leaves_slots_unused(monkeypatch):
    """With these seeds, a sample of 8 elements sometimes gives a wrong threshold; the code is still well-formed."""
    monkeypatch.setattr("tfdist.gradients.compression.methods.sparsification.sample_size", lambda ratio: 8)
    x = np.random.default_rng(2).standard_normal(1000).astype("float32")
    unused = set()
    for seed in (0, 64, 808):
        y, (indices, values) = with_code(TopK(ratio=0.1, method="sampled"), x, tf.constant([seed, 0]))
        used = indices.numpy() >= 0
        unused.add(100 - used.sum())
        assert indices.shape == (100,) and len(set(indices.numpy()[used])) == used.sum() == np.count_nonzero(y)
        np.testing.assert_array_equal(values.numpy()[used], x[indices.numpy()[used]])
        np.testing.assert_array_equal(np.sort(np.abs(x))[1000 - used.sum() :], np.sort(np.abs(y))[1000 - used.sum() :])
    assert 0 in unused and len(unused) == 3


@pytest.mark.parametrize("method", ["exact", "sampled"])
def test_ties_and_zeros(method):
    ones = np.where(np.arange(50_000) % 2, 1, -1).astype("float32")
    y, _ = with_code(TopK(ratio=0.1, method=method), ones)
    assert np.count_nonzero(y) == 5000
    few = np.zeros(50_000, "float32")
    few[[3, 49_999]] = 1, -2
    np.testing.assert_array_equal(with_code(TopK(ratio=0.1, method=method), few)[0], few)
    np.testing.assert_array_equal(with_code(TopK(ratio=0.1, method=method), few * 0)[0], 0)


class Shifted(Codec):
    """Halves the bytes, and changes every value, including zero."""

    biased = False

    def encode(self, x, seed):
        return [tf.cast(x + 1, tf.float16)]

    def decode(self, code, size):
        return tf.cast(code[0], tf.float32)


def test_values_by_another_codec():
    codec = TopK(ratio=0.1, method="sampled").then(Shifted())
    few = np.zeros(50_000, "float32")
    few[[3, 49_999]] = 1, -2
    y, (indices, values) = with_code(codec, few)
    assert (indices.dtype, values.dtype, values.shape) == (tf.int32, tf.float16, (5000,))
    np.testing.assert_array_equal(y[[3, 49_999]], [2, -1])
    assert np.count_nonzero(y) == 2, "a slot that is not used adds nothing, whatever its value decodes to"
    total = codec.sum([tf.stack([part, part, part]) for part in (indices, values)], 50_000)
    np.testing.assert_array_equal(total, 3 * y)
    assert code_bytes(codec, 50_000) == 4 * 5000 + 2 * 5000
    assert codec.biased and codec.randomized


@pytest.mark.parametrize("method", ["exact", "sampled"])
def test_nan_is_sent_and_breaks_nothing(method):
    x = np.random.default_rng(5).standard_normal(50_000).astype("float32")
    x[::7] = np.nan
    for ratio in (0.01, 1.0):
        y, _ = with_code(TopK(ratio=ratio, method=method), x)
        assert np.isnan(y).any()


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 300), st.sampled_from([1e-60, 1e-30, 0.5, 2.0, 1e30, 1e60]), st.integers(0, 99))
def test_what_a_threshold_leaves_is_below_it(size, value, seed):
    x = np.random.default_rng(seed).standard_normal(size).astype("float32") * np.float32(min(value, 1e10))
    recording = RecordingCollectives(OneReplica())
    limit = np.float32(max(1e-45, min(value, float(np.finfo("float32").max))))  # the value in float32
    [total], [sent], _, _ = reduced(Threshold(value=value), x, collectives=recording)
    np.testing.assert_array_equal(total, np.where(np.abs(x) >= limit, x, 0))
    np.testing.assert_array_equal(sent, total)
    assert np.abs(x - sent).max() < limit
    assert recording.payload_bytes == 8 * (np.count_nonzero(sent) + 1), "a value and an index each, and one row more"


@pytest.mark.parametrize("size", [50_000, 50_003])
def test_thresholds_of_long_vectors(size):
    x = np.random.default_rng(3).standard_normal(size).astype("float32")
    for value in (0.1, 2.0, 5.0):
        [total], [sent], _, _ = reduced(Threshold(value=value), x)
        np.testing.assert_array_equal(total, np.where(np.abs(x) >= np.float32(value), x, 0))
        np.testing.assert_array_equal(sent, total)


def test_replicas_send_different_numbers_of_elements(mirrored4):
    values = np.zeros((4, 100), "float32")
    for replica in range(4):
        values[replica, : 10 * replica] = replica + 1
    run = Runner(mirrored4, Threshold(value=1.5), [values])
    for scale in (1, 0, 0.5):  # 0 + 10 + 20 + 30 elements, none, and 0 + 0 + 20 + 30
        scaled = values * np.float32(scale)
        step = run([scaled], [])
        for totals in step.totals:
            np.testing.assert_array_equal(totals[0], np.where(scaled >= 1.5, scaled, 0).sum(0))
