"""Compressed reduce-scatter: equal totals, nothing lost with error feedback, fewer bytes, inf and NaN detected by all ranks."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.compression.reducers import named
from tests.gradients.replicas import bits, on_threads
from tfdist.gradients.compression import Codec
from tfdist.gradients.compression.methods.casts import BF16
from tfdist.gradients.compression.reducers import CodecReducer

METHODS = ["bf16", "int8(block=64)", "int8(stochastic=True)"]
SIZE = 1000


def vectors(replicas, steps):
    return list(np.random.default_rng(0).standard_normal((steps, 1, replicas, SIZE)).astype("float32"))


def run(reducer, gradients, native_all_to_all=True):
    steps, [recording, *_] = on_threads(reducer, gradients, native_all_to_all=native_all_to_all)
    return steps, recording.calls


def test_bytes_are_those_of_two_codes_of_a_share():
    """Each of N replicas sends N - 1 encoded shares, then its encoded sum to the N - 1 others."""
    _, calls = run(named("bf16"), vectors(4, 1))
    share = 256  # 1000 elements in 4 shares, each a multiple of 16
    assert [(call.operation, call.name) for call in calls] == [
        ("all_to_all", "step0/0/shares"),
        ("all_gather", "step0/0/sums"),
    ]
    assert [call.payload_bytes for call in calls] == [4 * (2 * share + 4), 2 * share + 4]


@pytest.mark.parametrize(
    ("text", "replicas", "native_all_to_all"), [("bf16", 2, True), ("bf16", 4, False), ("qsgd", 4, True)]
)
def test_each_code_goes_to_all_where_that_sends_no_more_or_a_sum_is_not_encoded_again(
    text, replicas, native_all_to_all
):
    _, calls = run(named(text), vectors(replicas, 1), native_all_to_all)
    assert [(call.operation, call.name) for call in calls] == [("all_gather", "step0/0")]


@pytest.mark.parametrize("text", METHODS)
def test_one_bad_element_anywhere_is_seen_by_all(text):
    for place, bad in ((0, np.nan), (300, np.inf), (SIZE - 1, -np.inf)):
        [values] = vectors(3, 1)
        values[0, 1, place] = bad
        [step], _ = run(named(text), [values])
        assert all(bits(witnesses) == bits(step.witnesses[0]) for witnesses in step.witnesses)
        assert not np.isfinite(step.witnesses[0]).all()
    [step], _ = run(named(text), vectors(3, 1))
    assert np.isfinite(step.witnesses).all()


class Hiding(BF16):
    """Codes do not contain non-finite values."""

    def encode(self, x, seed):
        return super().encode(tf.where(tf.math.is_finite(x), x, 0.0), seed)

    def check(self, x, code):
        return Codec.check(self, x, code)


def test_what_codes_do_not_show_the_checks_do():
    [values] = vectors(3, 1)
    values[0, 2, 5] = np.nan
    [step], _ = run(CodecReducer(Hiding()), [values])
    for [witness] in step.witnesses:
        assert list(np.isfinite(witness)) == [False, True, True], "of the share in which it is"
