"""Count sketch: estimates are within their bound, heavy elements of the sum are found, and their sums are exact."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.replicas import Runner
from tfdist.collectives import OneReplica, RecordingCollectives
from tfdist.gradients.compression.methods.random_projections import Sketch, _estimates, _sketch
from tfdist.gradients.compression.random_draws import sign_bits


def estimates(x, rows, columns, seed):
    blocks = -(-len(x) // columns)
    bits = tf.stack([sign_bits(blocks, columns, tf.constant([seed, row])) for row in range(rows)])
    offsets = tf.random.stateless_uniform([rows, blocks], [seed, rows], 0, columns, tf.int32)
    return _estimates(len(x), _sketch(tf.constant(x), bits, offsets), bits, offsets).numpy()


def test_one_row_is_unbiased_within_a_confidence_interval_and_its_variance_is_that_of_the_paper():
    x = np.random.default_rng(1).standard_normal(500).astype("float32")
    many = np.stack([estimates(x, 1, 50, seed) for seed in range(400)])
    error = many.std(0) / np.sqrt(len(many))
    assert (np.abs(many.mean(0) - x) < 5 * error).all()
    assert many.var(0).mean() <= 1.1 * (x**2).sum() / 50


def test_most_estimates_of_the_median_are_within_the_bound():
    """Charikar et al., lemma 4: the probability of an error above 3 |x| / sqrt(columns) decreases with the number of rows."""
    x = np.random.default_rng(2).standard_normal(5000).astype("float32")
    off = np.abs(estimates(x, 5, 200, 0) - x) / (np.linalg.norm(x) / np.sqrt(200))
    assert (off < 3).mean() > 0.99 and np.median(off) < 1


def test_elements_that_are_large_in_the_sum_alone_are_found(mirrored4):
    """The replicas' own larger elements cancel; the largest elements of the sum are the common ones."""
    random = np.random.default_rng(3)
    values = 0.01 * random.standard_normal((4, 4000)).astype("float32")
    own, shared = np.arange(0, 40), np.arange(100, 110)
    values[0, own], values[1, own] = 2, -2
    values[:, shared] += 1
    step = Runner(mirrored4, Sketch(columns=200, rows=5, k=10), [values]).steps([[values]])[0]
    for replica in range(4):
        np.testing.assert_array_equal(np.flatnonzero(step.totals[replica][0]), shared)
        np.testing.assert_array_equal(step.sent[replica][0][shared], values[replica, shared])
    np.testing.assert_allclose(step.totals[0][0][shared], values[:, shared].sum(0), rtol=1e-6)


@pytest.mark.parametrize("size", [1, 300, 301, 5000])
def test_payload(size):
    recording = RecordingCollectives(OneReplica())
    x = tf.ones([size])
    [total], *_ = Sketch(columns=100, rows=3, k=7).reduce([x], [tf.constant(0)], recording, name="g")
    assert {call.operation for call in recording.calls} == {"all_reduce"}
    assert recording.payload_bytes == (4 * size if size <= 300 else 4 * (300 + 1 + 7))
    assert np.count_nonzero(total) == (size if size <= 300 else 7)
