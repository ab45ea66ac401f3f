"""The time of one operation, measured inside a compiled loop, so that Python's own time is not in it."""

import math
from collections.abc import Callable

import tensorflow as tf

from tfdist.benchmark.measured import Measured
from tfdist.benchmark.operations import OPERATIONS
from tfdist.distribution.strategy import HasCollectives

MOST_CALLS = 1000  # in a repeat
DEADLINE = 600.0  # seconds, for a process to be a call behind


def measure(
    strategy: HasCollectives, name: str, size: int, dtype: tf.DType, *, repeats: int, repeat_seconds: float
) -> Measured:
    """Measures one operation at one size; every process calls it, and all get the same numbers.

    Args:
      strategy: whose collectives are measured.
      name: a key of `OPERATIONS`.
      size: bytes; made whole elements and equal parts. A barrier has none.
      dtype: of the elements.
      repeats: measurements.
      repeat_seconds: about how long one measurement is, in seconds; a call at least.
    """
    elements, true_bytes = OPERATIONS[name].elements(size, dtype.size, strategy.replicas)
    true_bytes = 0 if name == "barrier" else true_bytes
    loop = compiled_loop(strategy, name, elements, dtype)
    loop(tf.constant(1))  # traces it, and whatever the engine does at a first call
    first = _slowest(strategy, [float(loop(tf.constant(1)))])[0]
    calls = min(MOST_CALLS, max(1, math.ceil(repeat_seconds / max(first, 1e-9))))
    times = _slowest(strategy, [float(loop(tf.constant(calls))) / calls for _ in range(repeats)])
    return Measured(name, true_bytes, dtype.name, strategy.name, strategy.replicas, calls, tuple(times))


def compiled_loop(
    strategy: HasCollectives, name: str, elements: int, dtype: tf.DType
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a compiled function: number of calls, scalar int32 -> their seconds, scalar float64.

    Each call begins when this process's replicas have the result of the one before. One call that is not counted goes
    ahead, so that all processes begin together.
    """
    operation = OPERATIONS[name]

    def once(tensor: tf.Tensor, before: tf.Tensor, number: str) -> tf.Tensor:
        # The call itself too: an engine's operation without inputs of this iteration would be taken out of the loop.
        with tf.control_dependencies([before]):
            result = operation.call(strategy.collectives, tf.identity(tensor), f"bench/{name}/{number}")
        return tf.cast(tf.reshape(result, [-1])[0], tf.float32)

    def on_all(tensors: tf.Tensor, before: tf.Tensor, number: str) -> tf.Tensor:
        results = strategy.run(lambda tensor, before: once(tensor, before, number), tensors, before)
        # On the host: a device's result is there only when it has been copied out.
        with tf.device("CPU:0"):
            return tf.add_n([tf.identity(result) for result in strategy.local(results)])

    @tf.function(autograph=False)
    def loop(calls: tf.Tensor) -> tf.Tensor:
        # Not a constant of the graph, which would be folded and kept.
        tensors = strategy.run(lambda value: tf.fill([elements], tf.cast(value, dtype)), tf.minimum(calls, 1))
        done = on_all(tensors, tf.zeros([]), "first")
        with tf.control_dependencies([done]):
            begun = tf.timestamp()
        with tf.control_dependencies([begun]):
            done = tf.identity(done)
        _, done = tf.while_loop(
            lambda i, _: i < calls,
            lambda i, done: (i + 1, on_all(tensors, done, "next")),
            (tf.constant(0), done),
            parallel_iterations=1,
        )
        with tf.control_dependencies([done]):
            return tf.timestamp() - begun

    return loop


def _slowest(strategy: HasCollectives, times: list[float]) -> list[float]:
    """Each time on the process where it was longest."""
    everyone = strategy.group.gather("bench/times", times, deadline=DEADLINE)
    return [max(each) for each in zip(*everyone, strict=True)]
