"""The reducer contract, and the exact sum."""

import numpy as np
import tensorflow as tf

from tfdist.collectives import OneReplica, Recording
from tfdist.gradients import Reducer, Sum
from tfdist.gradients.reducer import specs_of, split_at


def test_sum_sends_one_message_and_keeps_nothing():
    recording = Recording(OneReplica())
    tensors = [tf.ones([3]), tf.ones([2, 2])]
    sums, sent, state, witnesses = Sum().reduce(tensors, [], recording, name="gradients")
    assert [(call.operation, call.name) for call in recording.calls] == [("all_reduce", "gradients")]
    assert state == []
    assert Sum().state([tf.TensorSpec([3])]) == []
    for total, own, witness, tensor in zip(sums, sent, witnesses, tensors, strict=True):
        for value in (total, own, witness):
            np.testing.assert_array_equal(value, tensor)


def test_sum_is_a_sum_and_no_mean(mirrored4):
    def replica_function():
        mine = [tf.cast(mirrored4.collectives.rank, tf.float32) + tf.constant([1.0, 2.0])]
        return Sum().reduce(mine, [], mirrored4.collectives, name="gradients").totals[0]

    for total in mirrored4.local(mirrored4.run(replica_function)):
        np.testing.assert_array_equal(total, [10.0, 14.0])


def test_a_reducer_must_only_say_how_it_reduces():
    assert Reducer.__abstractmethods__ == {"reduce"}


def test_specs_say_place_shape_and_dtype():
    specs = specs_of([tf.zeros([2, 3]), tf.zeros([], tf.float64)])
    assert [(spec.name, tuple(spec.shape), spec.dtype) for spec in specs] == [
        ("tensor0", (2, 3), tf.float32),
        ("tensor1", (), tf.float64),
    ]


def test_a_state_is_split():
    assert split_at(("a", "b", "c"), 1) == (["a"], ["b", "c"])
    assert split_at([], 0) == ([], [])
