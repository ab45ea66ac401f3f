"""Behavior of TensorFlow's operations, queues, threads, tapes and variables on which groups, messages and versions depend."""

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute import cross_device_utils

from tests.waiting import DEADLINE
from tfdist import keras_internals
from tfdist.collectives.process_groups import FIRST_KEY


def traced(function):
    return tf.function(function, autograph=False).get_concrete_function().graph


def of_type(graph, kind):
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


WAITING = """
import sys, threading
import numpy as np
import tensorflow as tf

threads, operations, seconds = map(int, sys.argv[1:])
tf.config.threading.set_inter_op_parallelism_threads(threads)
all_wait = threading.Barrier(operations)

def wait(x):
    try:
        all_wait.wait(seconds)
    except threading.BrokenBarrierError:
        return np.float32(0)
    return np.float32(1)

@tf.function(autograph=False)
def together(x):
    return [tf.numpy_function(wait, [x + i], tf.float32, stateful=False) for i in range(operations)]

print(int(sum(float(x) for x in together(tf.ones([])))))
"""


@pytest.mark.processes
@pytest.mark.parametrize(("threads", "operations", "seconds", "waited"), [(3, 3, 120, 3), (2, 3, 2, 0)])
def test_a_waiting_numpy_function_keeps_a_thread(threads: int, operations: int, seconds: int, waited: int) -> None:
    """Guards: a `tf.numpy_function` that waits in Python keeps one of the threads between operations.

    What depends on it: `cluster.devices.add_inter_op_threads`, which adds threads for operations of a step that wait for the
    devices of the process, while messages of the engine wait for other processes.
    """
    command = [sys.executable, "-c", WAITING, *map(str, (threads, operations, seconds))]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE)
    assert done.stdout == f"{waited}\n", done.stdout + done.stderr


@pytest.mark.parametrize(("scope", "gradient"), [(tf.init_scope, None), (keras_internals.outside_functions, 4.0)])
def test_an_init_scope_stops_gradient_tapes(scope, gradient) -> None:
    """Guards: inside of `tf.init_scope`, tapes record nothing, not even those that are entered there.

    What depends on it: `keras_internals.outside_functions`, in which the passes of a stage on devices are traced while a
    step of the host is.
    """
    found: list[tf.Tensor | None] = []

    @tf.function(autograph=False)
    def step() -> None:
        with scope():
            x = tf.constant(2.0)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.square(x)
            found.append(tape.gradient(y, x))

    step()
    assert found == [gradient]


def address(variable: tf.Variable) -> int:
    return np.asarray(memoryview(variable.read_value())).ctypes.data


def test_a_variable_shares_the_memory_of_the_value_that_it_is_assigned():
    weights, older = tf.Variable(tf.random.normal([100, 100])), tf.Variable(tf.zeros([100, 100]))
    before, place = weights.numpy(), address(weights)

    @tf.function(autograph=False)
    def step() -> None:
        older.assign(weights)
        weights.assign_add(tf.ones_like(weights))

    step()
    assert address(older) == place != address(weights)
    np.testing.assert_array_equal(older, before)
