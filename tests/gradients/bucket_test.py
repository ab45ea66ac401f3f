"""Properties of the bucket plan, and packing without any change of bits."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gradients.replicas import Runner
from tfdist.collectives import OneReplica, RecordingCollectives
from tfdist.distribution.strategy import State
from tfdist.gradients import Bucketed, Reducer, ReductionResult, Sum, plan
from tfdist.gradients.bucket import BUCKET_ORDERS
from tfdist.gradients.reducer import tensor_specs

SPEC = st.builds(
    tf.TensorSpec, st.lists(st.integers(0, 40), max_size=3), st.sampled_from([tf.float16, tf.float32, tf.float64])
)
LIMITS = st.tuples(st.integers(1, 500), st.integers(1, 2000))


def size(spec):
    return spec.shape.num_elements() * spec.dtype.size


@settings(deadline=None)
@given(st.lists(SPEC, max_size=30), LIMITS)
def test_plan(specs, limits):
    small_bytes, bucket_bytes = limits
    buckets = plan(specs, small_bytes, bucket_bytes)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(specs)))
    for bucket in buckets:
        assert bucket == sorted(bucket, reverse=True), "last layers first"
        assert len({specs[i].dtype for i in bucket}) == 1
        if len(bucket) > 1:
            assert all(size(specs[i]) < small_bytes for i in bucket)
            assert sum(size(specs[i]) for i in bucket) <= bucket_bytes
    firsts = [bucket[0] for bucket in buckets]
    assert firsts == sorted(firsts, reverse=True), "buckets in the order in which backward opens them"
    for dtype in (tf.float16, tf.float32, tf.float64):
        small = [b for b in buckets if size(specs[b[0]]) < small_bytes and specs[b[0]].dtype == dtype]
        for bucket, following in itertools.pairwise(small):  # closed only if the next tensor does not fit
            assert sum(size(specs[i]) for i in bucket) + size(specs[following[0]]) > bucket_bytes


def test_large_tensors_go_alone_and_uncopied():
    specs = [tf.TensorSpec([100], tf.float32), tf.TensorSpec([2], tf.float32), tf.TensorSpec([3], tf.float32)]
    assert plan(specs, small_bytes=400, bucket_bytes=4000) == [[2, 1], [0]]
    recording = RecordingCollectives(OneReplica())
    tensors = [tf.ones(spec.shape, spec.dtype) for spec in specs]
    sums = Bucketed(Sum(), 400, 4000).reduce(tensors, [], recording, name="g").totals
    assert [(call.name, call.shapes) for call in recording.calls] == [("g/bucket0", ((5,),)), ("g/bucket1", ((100,),))]
    assert sums[0] is tensors[0]


@pytest.mark.parametrize("limits", [(1, 1), (40, 60), (10**6, 10**6)], ids=["alone", "some", "one bucket"])
def test_bucketed_is_bitwise_the_sum(mirrored4, limits):
    shapes = [(3, 5), (), (7,), (0, 2), (2, 2, 2), (11,)]
    dtypes = ["float32", "float64", "float32", "float32", "float64", "float32"]
    random = np.random.default_rng(0)
    values = [random.standard_normal((4, *s)).astype(d) for s, d in zip(shapes, dtypes, strict=True)]

    plain, packed = (
        Runner(mirrored4, reducer, values)(values, []).totals for reducer in (Sum(), Bucketed(Sum(), *limits))
    )
    for replica in range(4):
        for a, b, value in zip(plain[replica], packed[replica], values, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert a.tobytes() == b.tobytes()
            np.testing.assert_allclose(b, value.sum(0), rtol=1e-5)


class Counting(Reducer):
    """Has as state, for each tensor, the number of calls and the last tensor; reports half of it as sent."""

    def state(self, specs):
        return [
            state
            for spec in specs
            for state in (
                State(f"{spec.name}/calls", (), tf.int32, False),
                State(f"{spec.name}/last", tuple(spec.shape), spec.dtype, True),
            )
        ]

    def reduce(self, tensors, state, collectives, *, name):
        pairs = [(calls + 1, tensor) for calls, tensor in zip(state[::2], tensors, strict=True)]
        totals = collectives.all_reduce(tensors, name=name)
        halves = [tensor / 2 for tensor in tensors]
        return ReductionResult(totals, halves, [value for pair in pairs for value in pair], [tf.reduce_max(totals[0])])


def test_each_bucket_has_a_state_of_its_own():
    bucketed = Bucketed(Counting(), small_bytes=100, bucket_bytes=100)
    tensors = [tf.fill([3], 1.0), tf.fill([50], 2.0), tf.fill([2, 2], 3.0)]
    states = bucketed.state([tf.TensorSpec(t.shape, t.dtype, f"v{i}") for i, t in enumerate(tensors)])
    assert [s.name for s in states] == ["v2..v0/calls", "v2..v0/last", "v1/calls", "v1/last"]
    assert [s.shape for s in states] == [(), (7,), (), (50,)]
    values = [tf.zeros(s.shape, s.dtype) for s in states]
    for _ in range(2):
        totals, sent, values, witnesses = bucketed.reduce(tensors, values, OneReplica(), name="g")
    assert [int(values[0]), int(values[2])] == [2, 2]
    np.testing.assert_array_equal(values[1], [3, 3, 3, 3, 1, 1, 1])
    for total, half, tensor in zip(totals, sent, tensors, strict=True):
        np.testing.assert_array_equal(total, tensor)
        np.testing.assert_array_equal(half, tensor / 2)
    assert [float(witness) for witness in witnesses] == [3, 2]


def test_names_of_states_are_a_buckets_own():
    specs = [tf.TensorSpec(shape, name=f"v{i}") for i, shape in enumerate([[3], [50], [2], [3], [50]])]
    names = [state.name for state in Bucketed(Counting(), 100, 24).state(specs)]
    assert len(names) == 2 * len(plan(specs, 100, 24)) == 8
    assert len(set(names)) == len(names)


class Shaped(Reducer):
    keeps_shapes = True
    biased = True

    def __init__(self):
        self.given = []

    def reduce(self, tensors, state, collectives, *, name):
        self.given.append([tuple(tensor.shape) for tensor in tensors])
        return ReductionResult(collectives.all_reduce(tensors, name=name), list(tensors), [], [])


def test_a_reducer_that_needs_shapes_gets_a_bucket_as_a_list():
    inner = Shaped()
    bucketed = Bucketed(inner, small_bytes=100, bucket_bytes=100)
    tensors = [tf.fill([3], 1.0), tf.fill([5, 10], 2.0), tf.fill([2, 2], 3.0)]
    reduced = bucketed.reduce(tensors, [], OneReplica(), name="g")
    assert inner.given == [[(2, 2), (3,)], [(5, 10)]]
    for total, tensor in zip(reduced.totals, tensors, strict=True):
        np.testing.assert_array_equal(total, tensor)
    assert (bucketed.biased, bucketed.keeps_shapes) == (True, True)
    assert (Bucketed(Sum()).biased, Bucketed(Sum()).keeps_shapes) == (False, False)


def test_the_order_of_sending_changes_neither_sums_nor_state():
    """Three buckets of 400, 40 and 120 bytes in the order of the backward pass; state and sums stay in their places."""
    sizes = (30, 10, 100)
    tensors = [tf.random.stateless_normal([size], [1, size]) for size in sizes]
    results = {}
    for order in BUCKET_ORDERS:
        recording = RecordingCollectives(OneReplica())
        bucketed = Bucketed(Counting(), small_bytes=1, bucket_bytes=1, order=order)
        state = [tf.constant(float(i)) for i, _ in enumerate(bucketed.state(tensor_specs(tensors)))]
        reduced = bucketed.reduce(tensors, state, recording, name="x")
        results[order] = [np.asarray(x).tolist() for x in (*reduced.totals, *reduced.state)]
        sent = [call.shapes[0][0] for call in recording.calls]
        assert sent == ([100, 10, 30] if order == "backward" else [10, 30, 100])
    assert results["backward"] == results["smallest"]
