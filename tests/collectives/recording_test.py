"""Counting calls and payload bytes."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives import OneReplica, RecordedCall, Recording

MATRIX, VECTOR = tf.ones([3, 4]), tf.ones([5], tf.float64)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_calls_and_payload(operation):
    recording = Recording(OneReplica())
    matrix, vector = getattr(recording, operation)([MATRIX, VECTOR], name="call")
    np.testing.assert_array_equal(matrix, MATRIX)
    np.testing.assert_array_equal(vector, VECTOR)
    assert recording.calls == [RecordedCall(operation, "call", (tf.float32, tf.float64), ((3, 4), (5,)))]
    assert recording.payload_bytes == 3 * 4 * 4 + 5 * 8


def test_payloads_add_up():
    recording = Recording(OneReplica())
    recording.barrier(name="barrier")
    assert recording.payload_bytes == 0
    recording.all_reduce([MATRIX], name="one")
    recording.all_gather([MATRIX], name="two")
    assert [call.operation for call in recording.calls] == ["barrier", "all_reduce", "all_gather"]
    assert [call.payload_bytes for call in recording.calls] == [0, 48, 48]
    assert recording.payload_bytes == 96


def test_dims_that_are_not_known_when_tracing_count_as_0():
    recording = Recording(OneReplica())

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def step(x):
        return recording.all_gather([x], name="gather")

    step(tf.ones([7, 2]))
    step(tf.ones([8, 2]))
    assert recording.calls == [RecordedCall("all_gather", "gather", (tf.float32,), ((None, 2),))]
    assert recording.payload_bytes == 0


def test_arguments_reach_the_inner_ones(mirrored2):
    recording = Recording(mirrored2.collectives)
    assert (recording.size, recording.wire) == (2, mirrored2.collectives.wire)

    def step():
        x = tf.cast(recording.rank, tf.float32) + 1.0
        return (
            recording.all_reduce([x], "max", name="max")[0],
            recording.reduce_scatter([tf.stack([x, x])], "mean", name="mean")[0][0],
            recording.broadcast([x], 1, name="root")[0],
        )

    highest, mean, root = mirrored2.run(step)
    assert [float(v) for v in mirrored2.local(highest)] == [2.0, 2.0]
    assert [float(v) for v in mirrored2.local(mean)] == [1.5, 1.5]
    assert [float(v) for v in mirrored2.local(root)] == [2.0, 2.0]
