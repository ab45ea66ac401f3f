"""Behavior of TensorFlow on which functions rely that call Python: threads of operations that wait, and tapes."""

import subprocess
import sys

import pytest
import tensorflow as tf

from tests.waiting import DEADLINE
from tfdist import keras_internals

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

    What depends on it: `cluster.devices.allow_waiting`, which adds threads for the operations of a step that wait for the
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
