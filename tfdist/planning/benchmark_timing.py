"""Measures the time of collectives in a compiled loop, without Python overhead."""

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

_Call = Callable[[Collectives, tf.Tensor, str], tf.Tensor]


class Operation(NamedTuple):
    """A method of `Collectives`."""

    call: _Call  # calls the method with a one-dimensional tensor and a name; returns the result
    has_parts: bool = False  # whether its tensor consists of N parts, one per replica
    input_is_complete: bool = True  # whether a replica's input is the complete tensor, or only its part
    reduces: bool = False  # whether it sums; engines support fewer dtypes for sums

    def elements(self, size: int, itemsize: int, replicas: int) -> tuple[int, int]:
        """Returns the number of elements in a replica's input, at least one per part, and the resulting bytes."""
        parts = replicas if self.has_parts else 1
        part = max(1, size // itemsize // parts)
        return part * (parts if self.input_is_complete else 1), part * parts * itemsize


def _barrier(collectives: Collectives, tensor: tf.Tensor, name: str) -> tf.Tensor:
    result = collectives.barrier(name=name)
    # The result must be used, because TensorFlow prunes unused Horovod operations.
    if tf.is_tensor(result):
        return result
    with tf.control_dependencies([result]):
        return tf.identity(tensor)


OPERATIONS: Mapping[str, Operation] = {
    "all_reduce": Operation(lambda c, x, name: c.all_reduce([x], name=name)[0], reduces=True),
    "all_gather": Operation(
        lambda c, x, name: c.all_gather([x], name=name)[0], has_parts=True, input_is_complete=False
    ),
    "all_to_all": Operation(lambda c, x, name: c.all_to_all([x], name=name)[0], has_parts=True),
    "reduce_scatter": Operation(lambda c, x, name: c.reduce_scatter([x], name=name)[0], has_parts=True, reduces=True),
    "broadcast": Operation(lambda c, x, name: c.broadcast([x], name=name)[0]),
    "barrier": Operation(_barrier),
}


def check_dtype(collectives: Collectives, names: Sequence[str], dtype: tf.DType) -> None:
    """Raises `InputError` if the engine does not support a dtype in one of the operations."""
    for name in names:
        dtypes = collectives.dtypes.reducible if OPERATIONS[name].reduces else collectives.dtypes.gatherable
        if name != "barrier" and dtype not in dtypes:
            supported = ", ".join(sorted(supported_dtype.name for supported_dtype in dtypes))
            raise InputError(
                f"--dtype must be supported by {name} of this strategy: {supported}. Received: {dtype.name}. Choose one of "
                f"these dtypes, or remove {name} from --operations."
            )


MAX_CALLS = 1000  # per repeat
DEADLINE = 600.0  # seconds to wait for slower processes


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
    """Measures an operation at one size; every process must call this function, and gets the same result.

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
    loop(tf.constant(1))  # traces the loop, and initializes the engine
    single_call = _slowest(strategy.group, [float(loop(tf.constant(1)))])[0]
    calls = min(MAX_CALLS, max(1, math.ceil(repeat_seconds / max(single_call, 1e-9))))
    times = _slowest(strategy.group, [float(loop(tf.constant(calls))) / calls for _ in range(repeats)])
    return Measurement(name, actual_bytes, dtype.name, strategy.name, strategy.replicas, calls, tuple(times), algorithm)


def compiled_loop(
    strategy: Strategy, name: str, elements: int, dtype: tf.DType, algorithm: str = ""
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a compiled function of the number of calls, scalar int32, that returns their total seconds, scalar float64.

    Each call starts when all replicas of this process have the result of the previous one. An additional first call, which
    is not measured, makes all processes start together.
    """
    operation, collectives = OPERATIONS[name], strategy.collectives
    if algorithm and strategy.tuned_collectives:
        collectives = strategy.tuned_collectives.with_table(AlgorithmTable.uniform(algorithm))

    def call_once(tensor: tf.Tensor, previous: tf.Tensor, label: str) -> tf.Tensor:
        # The call depends on the previous one: an operation without inputs from this iteration would be hoisted out of the
        # loop.
        with tf.control_dependencies([previous]):
            result = operation.call(collectives, tf.identity(tensor), f"bench/{name}{algorithm}/{label}")
        return tf.cast(tf.reshape(result, [-1])[0], tf.float32)

    def call_on_replicas(tensors: tf.Tensor, previous: tf.Tensor, label: str) -> tf.Tensor:
        results = strategy.run(lambda tensor, previous: call_once(tensor, previous, label), tensors, previous)
        # On the host, because the result of a device is complete only after it has been copied.
        with tf.device("CPU:0"):
            return tf.add_n([tf.identity(result) for result in strategy.local(results)])

    @tf.function(autograph=False)
    def loop(calls: tf.Tensor) -> tf.Tensor:
        # Computed from an argument, because constants would be folded and stored in the graph.
        tensors = strategy.run(lambda value: tf.fill([elements], tf.cast(value, dtype)), tf.minimum(calls, 1))
        result = call_on_replicas(tensors, tf.zeros([]), "first")
        with tf.control_dependencies([result]):
            start = tf.timestamp()
        with tf.control_dependencies([start]):
            result = tf.identity(result)
        _, result = tf.while_loop(
            lambda i, _: i < calls,
            lambda i, result: (i + 1, call_on_replicas(tensors, result, "next")),
            (tf.constant(0), result),
            parallel_iterations=1,
        )
        with tf.control_dependencies([result]):
            return tf.timestamp() - start

    return loop


def _slowest(group: Group, times: list[float]) -> list[float]:
    times_by_process = group.gather("bench/times", times, deadline=DEADLINE)
    return [max(call_times) for call_times in zip(*times_by_process, strict=True)]
