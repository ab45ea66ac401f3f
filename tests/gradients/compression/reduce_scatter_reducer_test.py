"""Compressed reduce-scatter: equal totals, nothing lost with error feedback, fewer bytes, inf and NaN detected by all ranks."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.compression.reducers import codec_of, named, on_threads
from tests.gradients.replicas import Runner
from tfdist.collectives import Recording
from tfdist.gradients import ErrorFeedback
from tfdist.gradients.compression import Codec
from tfdist.gradients.compression.methods.casts import BF16
from tfdist.gradients.compression.reduce_scatter_reducer import ReduceScatterReducer

METHODS = ["bf16", "int8(block=64)", "int8(stochastic=True)"]
SIZE = 1000


def vectors(replicas, steps):
    return np.random.default_rng(0).standard_normal((steps, replicas, SIZE)).astype("float32")


def run(reducer, values, native_all_to_all=True):
    """Returns for each rank the results of `reduce` for values [steps, replicas, n], and its calls."""
    ranks = on_threads(reducer, values[:, :, None], native_all_to_all=native_all_to_all)
    return [(made, recording.calls) for made, recording in ranks]


@pytest.mark.parametrize("replicas", [3, 4])
@pytest.mark.parametrize("text", METHODS)
def test_totals_are_equal_on_all_and_nothing_is_lost(text, replicas):
    reducer = ErrorFeedback(ReduceScatterReducer(codec_of(text)))
    values = vectors(replicas, 3)
    ranks = run(reducer, values)
    for step in zip(*(made for made, _ in ranks), strict=True):
        total = step[0].totals[0].numpy()
        assert all(mine.totals[0].numpy().tobytes() == total.tobytes() for mine in step)
        np.testing.assert_allclose(sum(mine.sent[0].numpy() for mine in step), total, rtol=1e-5, atol=1e-5)
    for rank, (made, _) in enumerate(ranks):
        sent = sum(reduced.sent[0].numpy() for reduced in made)
        np.testing.assert_allclose(sent + made[-1].state[0], values[:, rank].sum(0), rtol=1e-5, atol=1e-5)


def test_totals_are_near_the_sums():
    values = vectors(4, 1)
    [total] = {made[0].totals[0].numpy().tobytes() for made, _ in run(named("bf16"), values)}
    np.testing.assert_allclose(np.frombuffer(total, "float32"), values[0].sum(0), rtol=2**-7, atol=0.05)


def test_bytes_are_those_of_two_codes_of_a_share():
    """Each of N replicas sends N - 1 encoded shares, then its encoded sum to the N - 1 others."""
    [calls, *_] = [calls for _, calls in run(named("bf16"), vectors(4, 1))]
    share = 256  # 1000 elements in 4 shares, each a multiple of 16
    assert [(call.operation, call.name) for call in calls] == [
        ("all_to_all", "step0/0/shares"),
        ("all_gather", "step0/0/sums"),
    ]
    assert [call.payload_bytes for call in calls] == [4 * (2 * share + 4), 2 * share + 4]


@pytest.mark.parametrize(
    ("replicas", "native_all_to_all", "wanted"),
    [
        (3, True, [("all_to_all", "step0/0/shares"), ("all_gather", "step0/0/sums")]),
        (2, True, [("all_gather", "step0/0")]),
        (4, False, [("all_gather", "step0/0")]),
    ],
)
def test_each_code_goes_to_all_where_that_sends_no_more(replicas, native_all_to_all, wanted):
    [calls, *_] = [calls for _, calls in run(named("bf16"), vectors(replicas, 1), native_all_to_all)]
    assert [(call.operation, call.name) for call in calls] == wanted


@pytest.mark.parametrize("text", METHODS)
def test_one_bad_element_anywhere_is_seen_by_all(text):
    for place, bad in ((0, np.nan), (300, np.inf), (SIZE - 1, -np.inf)):
        values = vectors(3, 1)
        values[0, 1, place] = bad
        witnesses = [made[0].witnesses[0].numpy() for made, _ in run(named(text), values)]
        assert all(witness.tobytes() == witnesses[0].tobytes() for witness in witnesses)
        assert not np.isfinite(witnesses[0]).all()
    witnesses = [made[0].witnesses[0].numpy() for made, _ in run(named(text), vectors(3, 1))]
    assert np.isfinite(witnesses).all()


class Hiding(BF16):
    """Codes do not contain non-finite values."""

    def encode(self, x, seed):
        return super().encode(tf.where(tf.math.is_finite(x), x, 0.0), seed)

    def check(self, x, code):
        return Codec.check(self, x, code)


def test_what_codes_do_not_show_the_checks_do():
    values = vectors(3, 1)
    values[0, 2, 5] = np.nan
    for made, _ in run(ReduceScatterReducer(Hiding()), values):
        assert list(np.isfinite(made[0].witnesses[0])) == [False, True, True], "of the share in which it is"


def test_vectors_shorter_than_the_shares():
    values = np.arange(4, dtype="float32").reshape(1, 4, 1)
    for made, _ in run(named("bf16"), values):
        np.testing.assert_array_equal(made[0].totals[0], [6])


def test_in_a_compiled_step_of_four_replicas(mirrored4):
    wire = dataclasses.replace(mirrored4.collectives.wire, native_all_to_all=True)
    values = vectors(4, 2)

    class Exchanging:
        """The strategy, with an engine that supports all-to-all."""

        replicas, local, run = mirrored4.replicas, mirrored4.local, mirrored4.run
        collectives = Recording(mirrored4.collectives)

    Exchanging.collectives.wire = wire
    [first, second] = Runner(Exchanging, named("int8(block=64)"), [values[0]]).steps([[step] for step in values])
    for step in (first, second):
        assert len({totals[0].tobytes() for totals in step.totals}) == 1
        np.testing.assert_allclose(sum(sent[0] for sent in step.sent), step.totals[0][0], rtol=1e-5, atol=1e-5)
    for rank in range(4):
        sent = first.sent[rank][0] + second.sent[rank][0]
        np.testing.assert_allclose(sent + second.state[rank][0], values[:, rank].sum(0), rtol=1e-5, atol=1e-5)
    assert {call.operation for call in Exchanging.collectives.calls} == {"all_to_all", "all_gather"}
