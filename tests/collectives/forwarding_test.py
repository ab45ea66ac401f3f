"""Recorded calls and payload bytes; and messages of limited size, one after the other, never two on their way."""

import time

import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives import OneReplica, RecordedCall, RecordingCollectives
from tfdist.collectives.forwarding import SequentialCollectives

MATRIX, VECTOR = tf.ones([3, 4]), tf.ones([5], tf.float64)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_calls_and_payload(operation):
    recording = RecordingCollectives(OneReplica())
    matrix, vector = getattr(recording, operation)([MATRIX, VECTOR], name="call")
    np.testing.assert_array_equal(matrix, MATRIX)
    np.testing.assert_array_equal(vector, VECTOR)
    assert recording.calls == [RecordedCall(operation, "call", (tf.float32, tf.float64), ((3, 4), (5,)))]
    assert recording.payload_bytes == 3 * 4 * 4 + 5 * 8


def test_dims_that_are_not_known_when_tracing_count_as_0():
    recording = RecordingCollectives(OneReplica())

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def step(x):
        return recording.all_gather([x], name="gather")

    step(tf.ones([7, 2]))
    step(tf.ones([8, 2]))
    assert recording.calls == [RecordedCall("all_gather", "gather", (tf.float32,), ((None, 2),))]
    assert recording.payload_bytes == 0


def test_arguments_reach_the_inner_ones(mirrored2):
    recording = RecordingCollectives(mirrored2.collectives)
    assert (recording.size, recording.dtypes) == (2, mirrored2.collectives.dtypes)

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


@pytest.mark.parametrize("piece_bytes", [1, 16, 1 << 20])
def test_results_are_those_of_the_inner_ones(strategy, run, piece_bytes):
    def calls(collectives):
        rank = tf.cast(collectives.rank, tf.float32)
        matrix = tf.reshape(tf.range(21.0), [7, 3]) * (1 + rank)
        vector, scalar = tf.range(5, dtype=tf.int32), rank + 0.5
        return [
            collectives.all_reduce([matrix, scalar], name="sum"),
            collectives.all_reduce([matrix], "max", name="max"),
            collectives.all_gather([matrix, vector], name="gather"),
            collectives.broadcast([matrix], 0, name="broadcast"),
            collectives.all_to_all([tf.tile(matrix, [collectives.size, 1])], name="exchange"),
        ]

    found = run(strategy, lambda collectives: calls(SequentialCollectives(collectives, piece_bytes)))
    wanted = run(strategy, calls)
    for one, other in zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


def test_no_message_is_larger_than_a_piece():
    recording = RecordingCollectives(OneReplica())
    in_turn = SequentialCollectives(recording, 64)
    in_turn.all_gather([tf.zeros([40], tf.uint8), tf.zeros([100], tf.uint8)], name="codes")
    in_turn.all_reduce([tf.zeros([5, 5])], name="sum")
    assert [call.payload_bytes for call in recording.calls] == [40, 64, 36, 64, 36]
    assert len({call.name for call in recording.calls}) == 5


def test_rows_of_unknown_number_are_one_message():
    recording = RecordingCollectives(OneReplica())

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def step(x):
        in_turn = SequentialCollectives(recording, 8)
        return in_turn.all_gather([x], name="gather"), in_turn.all_reduce([x], name="sum")

    step(tf.ones([7, 2]))
    assert len(recording.calls) == 2


class Noting(OneReplica):
    """Notes when calls begin and end."""

    def __init__(self):
        super().__init__()
        self.events = []

    def all_reduce(self, tensors, op="sum", *, name):
        """Takes a while."""

        def slowly(x):
            self.events.append(f"begin {name}")
            time.sleep(0.02)
            self.events.append(f"end {name}")
            return x

        return [tf.numpy_function(slowly, [tensor], tensor.dtype) for tensor in tensors]


def test_a_message_begins_when_the_previous_one_has_ended():
    noting = Noting()

    @tf.function
    def step(x):
        in_turn = SequentialCollectives(noting, 8)
        return in_turn.all_reduce([x], name="large") + in_turn.all_reduce([x[:1]], name="small")

    step(tf.ones([6]))
    names = ["large/0/0", "large/0/1", "large/0/2", "small/0/0"]
    assert noting.events == [f"{what} {name}" for name in names for what in ("begin", "end")]
