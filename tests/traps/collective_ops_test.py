"""Behavior of TensorFlow's collective operations and queues on which groups and messages depend."""

import pytest
import tensorflow as tf
from tensorflow.python.distribute import cross_device_utils

from tfdist import keras_internals
from tfdist.collectives.process_groups import FIRST_KEY


def traced(function):
    """Returns the graph of a function."""
    return tf.function(function, autograph=False).get_concrete_function().graph


def of_type(graph, kind):
    """Returns the operations of a type."""
    return [operation for operation in graph.get_operations() if operation.type == kind]


def send():
    return tf.raw_ops.CollectiveBcastSendV2(input=tf.zeros([3]), group_size=2, group_key=1, instance_key=1)


@pytest.mark.parametrize("kind", ["CollectiveBcastSendV2", "RandomUniformInt"])
def test_broadcasts_and_random_numbers_are_not_always_run(kind):
    """So messages are marked: a function would leave out one whose result it does not return."""
    number = {"shape": tf.constant([], tf.int32), "minval": 0, "maxval": 1}
    call = send if kind == "CollectiveBcastSendV2" else lambda: tf.raw_ops.RandomUniformInt(**number)
    for mark, expected in ((lambda tensor: tensor, 0), (keras_internals.always_run, 1)):
        graph = traced(lambda mark=mark: mark(call()) is None)
        assert len(of_type(graph, kind)) == 1
        assert [operation.type for operation in graph.control_outputs].count(kind) == expected


@pytest.mark.parametrize("tokens", ["none", "one", "two"])
def test_sums_are_made_one_after_another(tokens):
    """So each call has an ordering token of its own; buckets would otherwise wait for each other at every level."""
    made = [tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=[], shared_name=f"token_{tokens}_{i}") for i in range(2)]

    def sums():
        results = []
        for i in range(2):
            token = {"none": [], "one": made[:1], "two": made[i : i + 1]}[tokens]
            call = {"group_size": 2, "group_key": 1, "instance_key": i, "ordering_token": token}
            results.append(tf.raw_ops.CollectiveReduceV2(input=tf.zeros([3]), merge_op="Add", final_op="Id", **call))
        return results

    first, second = of_type(traced(sums), "CollectiveReduceV2")
    assert (first in second.control_inputs) == (tokens != "two")


@pytest.mark.parametrize("handles", [1, 2])
def test_operations_on_one_handle_are_ordered(handles):
    """So a queue has two handles: a message may be received earlier in the trace of all replicas than it is sent."""
    queue = {"component_types": [tf.float32], "shared_name": f"queue_of_{handles}"}
    ends = [tf.raw_ops.FIFOQueueV2(**queue) for _ in range(handles)]

    def exchange():
        [received] = tf.raw_ops.QueueDequeueV2(handle=ends[0], component_types=[tf.float32])
        tf.raw_ops.QueueEnqueueV2(handle=ends[-1], components=[tf.zeros([3])])
        return received

    graph = traced(exchange)
    [get], [put] = of_type(graph, "QueueDequeueV2"), of_type(graph, "QueueEnqueueV2")
    assert (get in put.control_inputs) == (handles == 1)


def test_tf_distribute_counts_its_keys_from_below():
    """So our keys are the upper half of all: it would take a billion calls to reach them."""
    assert cross_device_utils.INSTANCE_KEY_START_NUMBER < 1000 < FIRST_KEY
    keys = cross_device_utils.CollectiveKeys()
    group = keys.get_group_key(["device"])
    found = [keys.get_instance_key(group, "device") for _ in range(2)]
    assert found[1] == found[0] + 1 and group < 1000
