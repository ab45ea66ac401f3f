"""TensorFlow: its servers, its iterators, its graphs."""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import distribute_lib, values
from tensorflow.python.eager import context, record
from tensorflow.python.framework import dtypes, ops
from tensorflow.python.types import core


def limit_start_of_workers(workers: int, seconds: float) -> None:
    """Makes TensorFlow's servers of a job, of which this process will start one, give up waiting for each other.

    By itself `MultiWorkerMirroredStrategy` waits without end for a process that died before its own server was up, in
    a call that holds Python's lock: no thread runs, and no signal is handled. Afterwards it raises a
    `DeadlineExceededError`.

    Args:
      workers: how many servers there will be; task 0 of the job `worker` coordinates them.
      seconds: until all must be up, from when this one is.
    """
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        cluster_register_timeout_in_ms=int(1000 * seconds),
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=workers)],
    )
    context.context().coordination_service.cluster_register_with_barrier = True


@contextlib.contextmanager
def untuned_device_iterators() -> Iterator[None]:
    """Iterators over distributed data sets that are made inside end at once.

    tf.distribute puts a data set of its own on each device, which has a thread that tunes its buffer of one element and
    sleeps for up to a minute; an iterator's end waits until it wakes. No public option reaches these data sets.
    """
    make = multi_device_iterator_ops._create_device_dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    multi_device_iterator_ops._create_device_dataset = lambda *args: make(*args).with_options(options)
    try:
        yield
    finally:
        multi_device_iterator_ops._create_device_dataset = make


def is_computed_from(value: Any, tensors: Collection[int]) -> bool:
    """Whether a tensor of a graph is computed from one of others, which are given by their ids."""
    if not isinstance(value, tf.Tensor) or not hasattr(value, "graph"):
        return False
    found, seen = [value], {id(value)}
    while found:
        inputs = [tensor for tensor in found.pop().op.inputs if id(tensor) not in seen]
        if any(id(tensor) in tensors for tensor in inputs):
            return True
        seen |= {id(tensor) for tensor in inputs}
        found += inputs
    return False


@contextlib.contextmanager
def variables_restored(function: Any) -> Iterator[None]:
    """Inside, a concrete function may be called; at the end every variable that it uses has its value of before."""
    handles = [tensor for tensor in function.graph.external_captures if tensor.dtype == tf.resource]
    of_variables = [handle for handle in handles if getattr(handle, "_handle_data", None) is not None]
    kept = [
        (handle, tf.raw_ops.ReadVariableOp(resource=handle, dtype=data.shape_and_type[0].dtype))
        for handle in of_variables
        if (data := handle._handle_data).is_set and len(data.shape_and_type) == 1
    ]
    kept = [(handle, tf.raw_ops.DeepCopy(x=value)) for handle, value in kept]
    try:
        yield
    finally:
        for handle, value in kept:
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)


@contextlib.contextmanager
def captured_through(replaced: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    """Inside, tensors with values that the function under trace takes from outside of it are replaced by others."""
    graph = ops.get_default_graph()
    capture = graph.capture

    def capture_replaced(tensor: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
        is_value = isinstance(tensor, core.Value) and tensor.dtype in dtypes.TF_VALUE_DTYPES
        return capture(replaced(tensor) if is_value else tensor, *args, **kwargs)

    graph.capture = capture_replaced
    try:
        yield
    finally:
        del graph.capture


@contextlib.contextmanager
def outside_scopes() -> Iterator[None]:
    """Inside, no scope of a tf.distribute strategy is open, and no variable creator of the caller's is in force.

    What Keras and callbacks create there, such as the optimizer that Keras makes at its first save and throws away, belongs to
    this process alone.
    """
    graph = ops.get_default_graph()
    creators, graph._variable_creator_stack = graph._variable_creator_stack, []
    distribute_lib._push_per_thread_mode(distribute_lib._get_default_replica_mode())
    try:
        yield
    finally:
        distribute_lib._pop_per_thread_mode()
        graph._variable_creator_stack = creators


@functools.cache
def let_variables_be_numbers() -> None:
    """Makes variables of tf.distribute's strategies numbers where those of one device are: in `float(learning_rate)`."""
    for name, kind in (("__int__", int), ("__float__", float)):
        if name not in values.DistributedVariable.__dict__:
            setattr(values.DistributedVariable, name, lambda variable, kind=kind: kind(variable.numpy()))


_inlined = [0]  # how many replicas' threads are tracing so


@contextlib.contextmanager
def functions_inlined() -> Iterator[None]:
    """Inside, a `tf.function` that is called is traced as a part of its caller: no earlier trace of it is used again."""
    _inlined[0] += 1
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        _inlined[0] -= 1
        if not _inlined[0]:
            tf.config.run_functions_eagerly(False)


def no_gradients_recorded() -> contextlib.AbstractContextManager:
    """Inside, no gradient tape sees what is computed."""
    return record.stop_recording()


def wait_for_devices() -> None:
    """Returns when all devices have done what they were given; other threads of Python run meanwhile.

    A value that is fetched from DTensor before it is there holds Python's lock until then.
    """
    context.context().sync_executors()


def operations_of(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Every operation of a graph, those inside its loops, branches and functions among them."""
    yield from graph.get_operations()
    for function in graph._functions.values():
        yield from operations_of(function.graph)
