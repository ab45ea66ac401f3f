"""The contract of a reducer, and the exact sum."""

import numpy as np
import tensorflow as tf

from tfdist.collectives import OneReplica, Recording
from tfdist.gradients import Reducer, Sum


def test_sum_sends_one_message_and_keeps_nothing():
    recording = Recording(OneReplica())
    tensors = [tf.ones([3]), tf.ones([2, 2])]
    sums, state = Sum().reduce(tensors, [], recording, name="gradients")
    assert [(call.operation, call.name) for call in recording.calls] == [("all_reduce", "gradients")]
    assert state == []
    assert Sum().state([tf.TensorSpec([3])]) == []
    for total, tensor in zip(sums, tensors, strict=True):
        np.testing.assert_array_equal(total, tensor)


def test_sum_is_a_sum_and_no_mean(mirrored4):
    def replica_function():
        mine = [tf.cast(mirrored4.collectives.rank, tf.float32) + tf.constant([1.0, 2.0])]
        return Sum().reduce(mine, [], mirrored4.collectives, name="gradients")[0][0]

    for total in mirrored4.local(mirrored4.run(replica_function)):
        np.testing.assert_array_equal(total, [10.0, 14.0])


def test_a_reducer_must_only_say_how_it_reduces():
    assert Reducer.__abstractmethods__ == {"reduce"}
