"""Threshold: exactly the elements that reach the value are sent, however many there are on each replica."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.collectives import OneReplica, Recording
from tfdist.errors import InputError
from tfdist.gradients.compression.methods.threshold import Threshold


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 300), st.sampled_from([1e-60, 1e-30, 0.5, 2.0, 1e30, 1e60]), st.integers(0, 99))
def test_what_is_left_is_below_the_value(size, value, seed):
    x = np.random.default_rng(seed).standard_normal(size).astype("float32") * np.float32(min(value, 1e10))
    recording = Recording(OneReplica())
    limit = np.float32(max(1e-45, min(value, float(np.finfo("float32").max))))  # the value in float32
    [total], [sent], _, _ = Threshold(value=value).reduce([tf.constant(x)], [], recording, name="g")
    np.testing.assert_array_equal(total, np.where(np.abs(x) >= limit, x, 0))
    np.testing.assert_array_equal(sent, total)
    assert np.abs(x - sent).max() < limit
    assert recording.payload_bytes == 8 * (np.count_nonzero(sent) + 1), "a value and an index each, and one row more"


@pytest.mark.parametrize("size", [50_000, 50_003])
def test_long_vectors(size):
    x = np.random.default_rng(3).standard_normal(size).astype("float32")
    for value in (0.1, 2.0, 5.0):
        [total], [sent], _, _ = Threshold(value=value).reduce([tf.constant(x)], [], OneReplica(), name="g")
        np.testing.assert_array_equal(total, np.where(np.abs(x) >= np.float32(value), x, 0))
        np.testing.assert_array_equal(sent, total)


def test_replicas_send_different_numbers(mirrored4, runner):
    values = np.zeros((4, 100), "float32")
    for replica in range(4):
        values[replica, : 10 * replica] = replica + 1
    run = runner(mirrored4, Threshold(value=1.5), [values])
    for scale in (1, 0, 0.5):  # 0 + 10 + 20 + 30 elements, none, and 0 + 0 + 20 + 30
        scaled = values * np.float32(scale)
        step = run([scaled], [])
        for totals in step.totals:
            np.testing.assert_array_equal(totals[0], np.where(scaled >= 1.5, scaled, 0).sum(0))


def test_contract(check_contract):
    check_contract("threshold(value=1.0)")


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "a", True, None])
def test_bad_parameters(value):
    with pytest.raises(InputError, match="threshold .*Received: ") as caught:
        Threshold(value=value)
    assert "\n" not in str(caught.value)
