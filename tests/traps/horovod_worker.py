"""One rank of the Horovod traps: runs all experiments and prints the results as one line of JSON.

python tests/traps/horovod_worker.py
"""

import hashlib
import json
import statistics
import time
from collections.abc import Callable

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

import tfdist
import tfdist.collectives

TENSORS = 40
REPEATS = 10
CALLS = 15
LATE = 2.0  # seconds
TURNS = 500


def keras_optimizer() -> list[float]:
    """Returns this rank's weights after `model.fit` with Horovod's Keras optimizer and its own data."""
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    data = np.random.default_rng(hvd.rank())
    model.fit(data.normal(size=(32, 2)), data.normal(size=(32, 1)), batch_size=8, epochs=2, shuffle=False, verbose=0)
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()]).tolist()


def different_sums() -> int:
    """Returns in how many repetitions separately named all-reduces differ when they are made at once and one by one.

    Of operations that are made at once, Horovod fuses those that all ranks have announced by the same cycle, which depends on
    timing. Of operations that are made one by one, it cannot fuse any.
    """
    data = np.random.default_rng(100 + hvd.rank())
    inputs = [tf.constant(data.normal(size=37 * (i + 1)), tf.float32) for i in range(TENSORS)]

    @tf.function(autograph=False)
    def at_once() -> list[tf.Tensor]:
        return [hvd.allreduce(x, op=hvd.Sum, name=f"sums/{i}") for i, x in enumerate(inputs)]

    @tf.function(autograph=False)
    def one_by_one() -> list[tf.Tensor]:
        sums: list[tf.Tensor] = []
        for i, x in enumerate(inputs):
            with tf.control_dependencies(sums[-1:]):
                sums.append(hvd.allreduce(tf.identity(x), op=hvd.Sum, name=f"sums/{i}"))
        return sums

    def digest(sums: list[tf.Tensor]) -> bytes:
        return hashlib.sha256(b"".join(x.numpy().tobytes() for x in sums)).digest()

    return sum(digest(at_once()) != digest(one_by_one()) for _ in range(REPEATS))


def allreduce_seconds() -> float:
    """Returns the median duration of an all-reduce of 1 MB."""
    x = tf.ones(2**18)

    def once() -> float:
        start = time.perf_counter()
        hvd.allreduce(x, op=hvd.Sum, name="timed").numpy()
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(CALLS))


def errors_for_bfloat16() -> dict[str, str]:
    """Returns the errors that Horovod's operations raise for bfloat16, by operation."""
    found = {}
    for name in ("allreduce", "allgather", "alltoall", "broadcast", "reducescatter"):
        try:
            with tf.Graph().as_default():
                getattr(hvd, name)(
                    tf.zeros([hvd.size()], tf.bfloat16), **({"root_rank": 0} if name == "broadcast" else {})
                )
        except TypeError as error:
            found[name] = str(error)
    return found


def used(value: tf.Tensor) -> tf.Tensor:
    with tf.control_dependencies([tf.debugging.Assert(value > 0, [value])]):
        return tf.identity(value)


def seconds_of_waiting(message: Callable[[], tf.Tensor]) -> float:
    """Returns how long a compiled function that ends after a message waits for the last rank, which is late."""

    @tf.function(autograph=False)
    def wait() -> tf.Tensor:
        with tf.control_dependencies([message()]):
            return tf.timestamp()

    wait()
    hvd.allreduce(tf.ones([]), name="together")
    begun = time.time()
    if hvd.rank() == hvd.size() - 1:
        time.sleep(LATE)
    return float(wait()) - begun


def seconds_in_a_loop(message: Callable[[], tf.Tensor]) -> float:
    """Returns the duration of an iteration of a compiled loop that only sends a message."""

    def turn(i: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.control_dependencies([value]):
            return i + 1, tf.reshape(message(), [-1])[0]

    @tf.function(autograph=False)
    def loop() -> tf.Tensor:
        return tf.while_loop(lambda i, _: i < TURNS, turn, (tf.constant(0), tf.zeros([])), parallel_iterations=1)[1]

    loop()
    begun = time.perf_counter()
    loop()
    return (time.perf_counter() - begun) / TURNS


def broadcasts_run(function: Callable[[], object]) -> int:
    """Returns how many broadcasts are left in a compiled function after TensorFlow has optimized it."""
    compiled = tf.function(function, autograph=False)
    context.enable_graph_collection()
    compiled()
    collected = context.export_run_metadata()
    context.disable_graph_collection()
    return sum(node.op == "HorovodBroadcast" for graph in collected.partition_graphs for node in graph.node)


def equal_broadcasts() -> list[tf.Tensor]:
    x = tf.random.uniform([3])
    return [hvd.broadcast(x, 0, name="equal_a"), hvd.broadcast(x, 0, name="equal_b")]


def awaited_broadcast() -> tf.Tensor:
    x = tf.random.uniform([3])
    with tf.control_dependencies([hvd.broadcast(x, 0, name="awaited")]):
        return tf.identity(x)


def our_messages(collectives: tfdist.collectives.Collectives) -> tf.Tensor:
    """Two messages of equal tensors from rank 0 to 1, of which nothing is used."""
    rank, specs = hvd.rank(), [tf.TensorSpec([3], tf.float32)]
    for tag in ("a", "b"):
        if rank == 0:
            collectives.send([tf.zeros([3])], 1, tag=tag)
        elif rank == 1:
            collectives.receive(specs, 0, tag=tag)
    return tf.zeros([])


def error_of_eager_broadcasts() -> str:
    """Returns the error of two broadcasts of different names and roots, of which each rank makes another one first."""
    try:
        first = int(hvd.rank() > 0)
        hvd.broadcast(tf.zeros([3]), first, name=f"eager_{first}")
    except tf.errors.OpError as error:
        return str(error)
    return ""


def main() -> None:
    strategy = tfdist.load_strategy("horovod", start_timeout_seconds=60, groups=[[0, 1]])
    found: dict[str, object] = {"weights": keras_optimizer()}
    found["bfloat16"] = errors_for_bfloat16()
    found["different_sums"] = different_sums()
    ours = strategy.collectives
    found["late"] = LATE
    found["waits"] = {
        "constant": seconds_of_waiting(lambda: used(hvd.allreduce(tf.ones([1000]), name="constant")[0])),
        "unused": seconds_of_waiting(lambda: hvd.allreduce(tf.cast(tf.timestamp(), tf.float32), name="unused")),
        "our constant": seconds_of_waiting(lambda: used(ours.all_reduce([tf.ones([1000])], name="ours")[0][0])),
        "our barrier": seconds_of_waiting(lambda: ours.barrier(name="barrier")),
    }
    found["seconds_of_a_turn"] = {
        "constant": seconds_in_a_loop(lambda: hvd.allreduce(tf.ones([9]), name="loop")),
        "our constant": seconds_in_a_loop(lambda: ours.all_reduce([tf.ones([9])], name="our_loop")[0]),
        "our barrier": seconds_in_a_loop(lambda: tf.cast(ours.barrier(name="barrier_loop"), tf.float32)),
    }
    found["broadcasts"] = {
        "equal": broadcasts_run(equal_broadcasts),
        "awaited": broadcasts_run(awaited_broadcast),
        "our messages": broadcasts_run(lambda: our_messages(ours)),
    }
    found["eager_broadcasts"] = error_of_eager_broadcasts()
    found["seconds"] = allreduce_seconds()
    x = tf.ones((3 * hvd.size(), 2))
    hvd.alltoall(x, splits=[3] * hvd.size(), name="alltoall")
    found["seconds_after_alltoall"] = allreduce_seconds()
    hvd.reducescatter(x, op=hvd.Sum, name="reducescatter")
    found["seconds_after_reducescatter"] = allreduce_seconds()
    strategy.group.barrier("done")
    print(f"\n{json.dumps(found)}", flush=True)
    strategy.group.leave()
    strategy.close()


if __name__ == "__main__":
    main()
