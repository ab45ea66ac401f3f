"""The operations that are measured, and their time inside a compiled loop, which excludes Python overhead."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.config.all_reduce import AlgorithmTable
from tfdist.coordination import Group
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.planning.benchmark_results import Measurement

RecordedCall = Callable[[Collectives, tf.Tensor, str], tf.Tensor]


class Operation(NamedTuple):
    """One method of `Collectives`.

    Attributes:
      call: calls the method with a one-dimensional tensor and a name; returns the result.
      parts: whether its bytes consist of N parts, one per replica.
      input_is_complete: whether a replica's input consists of all of the bytes, or only of its part.
      reduces: whether it sums, which fewer dtypes support.
    """

    call: RecordedCall
    parts: bool = False
    input_is_complete: bool = True
    reduces: bool = False

    def elements(self, size: int, itemsize: int, replicas: int) -> tuple[int, int]:
        """Returns the number of elements in a replica's input, at least one per part, and the resulting bytes.

        Args:
          size: requested bytes.
          itemsize: bytes per element.
          replicas: number of replicas.
        """
        parts = replicas if self.parts else 1
        part = max(1, size // itemsize // parts)
        return part * (parts if self.input_is_complete else 1), part * parts * itemsize


def _barrier(collectives: Collectives, tensor: tf.Tensor, name: str) -> tf.Tensor:
    done = collectives.barrier(name=name)
    # Its value must be used, because TensorFlow prunes a Horovod operation whose result is unused.
    if tf.is_tensor(done):
        return done
    with tf.control_dependencies([done]):
        return tf.identity(tensor)


OPERATIONS: Mapping[str, Operation] = {
    "all_reduce": Operation(lambda c, x, name: c.all_reduce([x], name=name)[0], reduces=True),
    "all_gather": Operation(lambda c, x, name: c.all_gather([x], name=name)[0], parts=True, input_is_complete=False),
    "all_to_all": Operation(lambda c, x, name: c.all_to_all([x], name=name)[0], parts=True),
    "reduce_scatter": Operation(lambda c, x, name: c.reduce_scatter([x], name=name)[0], parts=True, reduces=True),
    "broadcast": Operation(lambda c, x, name: c.broadcast([x], name=name)[0]),
    "barrier": Operation(_barrier),
}


def check_dtype(collectives: Collectives, names: Sequence[str], dtype: tf.DType) -> None:
    """Checks that the engine supports a dtype.

    Raises:
      InputError: one of the operations does not support it.
    """
    for name in names:
        wire = collectives.wire.reduces if OPERATIONS[name].reduces else collectives.wire.gathers
        if name != "barrier" and dtype not in wire:
            known = ", ".join(sorted(each.name for each in wire))
            raise InputError(
                f"--dtype must be supported by {name} of this strategy: {known}. Received: {dtype.name}. Choose one of "
                f"them, or leave {name} out of --operations."
            )


MOST_CALLS = 1000  # per repeat
DEADLINE = 600.0  # seconds of delay of a process


def measure(
    strategy: Strategy,
    name: str,
    size: int,
    dtype: tf.DType,
    *,
    repeats: int,
    repeat_seconds: float,
    algorithm: str = "",
) -> Measurement:
    """Measures one operation at one size; every process must call it, and all get the same result.

    Args:
      strategy: strategy whose collectives are measured.
      name: a key of `OPERATIONS`.
      size: bytes, rounded to whole elements and equal parts; ignored for a barrier.
      dtype: dtype of the elements.
      repeats: number of measurements.
      repeat_seconds: approximate seconds per measurement, which has at least one call.
      algorithm: all-reduce algorithm, for a strategy with `tuned` collectives; empty for the engine's operation.
    """
    elements, actual_bytes = OPERATIONS[name].elements(size, dtype.size, strategy.replicas)
    actual_bytes = 0 if name == "barrier" else actual_bytes
    loop = compiled_loop(strategy, name, elements, dtype, algorithm)
    loop(tf.constant(1))  # traces it, and triggers the engine's initialization at a first call
    single_call = _slowest(strategy.group, [float(loop(tf.constant(1)))])[0]
    calls = min(MOST_CALLS, max(1, math.ceil(repeat_seconds / max(single_call, 1e-9))))
    times = _slowest(strategy.group, [float(loop(tf.constant(calls))) / calls for _ in range(repeats)])
    return Measurement(name, actual_bytes, dtype.name, strategy.name, strategy.replicas, calls, tuple(times), algorithm)


def compiled_loop(
    strategy: Strategy, name: str, elements: int, dtype: tf.DType, algorithm: str = ""
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a compiled function: number of calls, scalar int32 -> seconds for all of them, scalar float64.

    Each call starts when all replicas of this process have the result of the previous one. An additional first call, which
    is not counted, makes all processes start together.
    """
    operation, collectives = OPERATIONS[name], strategy.collectives
    if algorithm and strategy.tuned:
        collectives = strategy.tuned.with_table(AlgorithmTable.of(algorithm))

    def once(tensor: tf.Tensor, before: tf.Tensor, number: str) -> tf.Tensor:
        # The call itself depends on the previous one, too: an engine's operation without inputs from this iteration would
        # be hoisted out of the loop.
        with tf.control_dependencies([before]):
            result = operation.call(collectives, tf.identity(tensor), f"bench/{name}{algorithm}/{number}")
        return tf.cast(tf.reshape(result, [-1])[0], tf.float32)

    def on_all(tensors: tf.Tensor, before: tf.Tensor, number: str) -> tf.Tensor:
        results = strategy.run(lambda tensor, before: once(tensor, before, number), tensors, before)
        # On the host, because a device's result is only complete once it has been copied.
        with tf.device("CPU:0"):
            return tf.add_n([tf.identity(result) for result in strategy.local(results)])

    @tf.function(autograph=False)
    def loop(calls: tf.Tensor) -> tf.Tensor:
        # Computed from an argument, because a constant would be folded and stored in the graph.
        tensors = strategy.run(lambda value: tf.fill([elements], tf.cast(value, dtype)), tf.minimum(calls, 1))
        done = on_all(tensors, tf.zeros([]), "first")
        with tf.control_dependencies([done]):
            start = tf.timestamp()
        with tf.control_dependencies([start]):
            done = tf.identity(done)
        _, done = tf.while_loop(
            lambda i, _: i < calls,
            lambda i, done: (i + 1, on_all(tensors, done, "next")),
            (tf.constant(0), done),
            parallel_iterations=1,
        )
        with tf.control_dependencies([done]):
            return tf.timestamp() - start

    return loop


def _slowest(group: Group, times: list[float]) -> list[float]:
    """Returns the maximum of each time over all processes."""
    times_by_process = group.gather("bench/times", times, deadline=DEADLINE)
    return [max(times_of_one) for times_of_one in zip(*times_by_process, strict=True)]
