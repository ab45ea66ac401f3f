"""Accesses internals of TensorFlow: servers, iterators, and graphs."""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.core.protobuf import rewriter_config_pb2
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.distribute import distribute_lib, values
from tensorflow.python.eager import context, record
from tensorflow.python.framework import dtypes, ops
from tensorflow.python.ops import control_flow_v2_func_graphs
from tensorflow.python.types import core

from tfdist.keras_internals.patching import Context, patched

# AutoGraph converts users' functions, but not those of tfdist, which do not need it. It parses and rewrites the source of
# every function that it calls, which took a third of the CPU time of a short run.

_PACKAGE = __name__.partition(".")[0]


# Excludes a function of tfdist for `tf.data`, and functions that it calls, from AutoGraph. The function must call users'
# functions through `with_autograph`.
without_autograph = tf.autograph.experimental.do_not_convert


def with_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Converts a user's function with AutoGraph, as `tf.data` does; returns a function of tfdist unchanged."""
    if tf.executing_eagerly() or _is_tfdist_function(function):
        return function
    status = ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED)
    return tf.__internal__.autograph.tf_convert(function, status)


def _is_tfdist_function(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", "")).partition(".")[0] == _PACKAGE


def limit_start_of_workers(workers: int, seconds: float) -> None:
    """Limits how long the TensorFlow servers of a job wait for each other; call it before this process's server starts.

    By default `MultiWorkerMirroredStrategy` waits forever for a process that died before its server was up, in a call that
    holds the GIL and handles no signals. With a limit, it raises `DeadlineExceededError` unless all servers are up
    `seconds` after the start of this server. Task 0 of the job `worker` coordinates them.
    """
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        cluster_register_timeout_in_ms=int(1000 * seconds),
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=workers)],
    )
    context.context().coordination_service.cluster_register_with_barrier = True


# For each dtype that TensorFlow cannot broadcast between processes, a wider dtype that it can broadcast.
_WIDE_DTYPES = (
    {tf.bfloat16: tf.float32}
    | dict.fromkeys((tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32)
    | {tf.uint32: tf.int64}
)


def broadcast_initial_values_of_any_dtype(strategy: tf.distribute.MultiWorkerMirroredStrategy) -> None:
    """Makes a strategy broadcast initial values in a wider dtype if TensorFlow cannot broadcast the variable's dtype."""
    make_initial_value = strategy.extended._get_variable_creator_initial_value

    def make_wide_value(replica_id: int, device: str, primary_var: Any, **kwargs: Any) -> Callable[[], tf.Tensor]:
        if primary_var is not None:  # the value of this process's first replica
            return make_initial_value(replica_id, device, primary_var, **kwargs)

        def initial_value() -> tf.Tensor:
            value = kwargs["initial_value"]
            value = value() if callable(value) else value
            value = getattr(value, "wrapped_value", value)  # from a checkpoint
            value = tf.convert_to_tensor(value, kwargs.get("dtype"))
            arguments = {"initial_value": tf.cast(value, _WIDE_DTYPES.get(value.dtype, value.dtype)), "dtype": None}
            return tf.cast(make_initial_value(replica_id, device, None, **{**kwargs, **arguments})(), value.dtype)

        return initial_value

    strategy.extended._get_variable_creator_initial_value = make_wide_value


def untuned_device_iterators() -> Context:
    """Context in which the destructors of new iterators over distributed datasets do not wait.

    tf.distribute creates a dataset on each device, with a thread that tunes its buffer of one element and sleeps for up to a
    minute; the destructor of the iterator waits for it. These datasets have no public options.
    """
    module, make = multi_device_iterator_ops, multi_device_iterator_ops._create_device_dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return patched((module, "_create_device_dataset", lambda *args: make(*args).with_options(options)))


def is_computed_from(values: Any, tensors: Collection[int]) -> bool:
    """Returns whether a symbolic tensor in a structure is, or is computed from, a tensor with one of these ids."""
    stack = [value for value in tf.nest.flatten(values) if isinstance(value, tf.Tensor) and hasattr(value, "graph")]
    visited: set[int] = set()
    while stack:
        tensor = stack.pop()
        if id(tensor) in tensors:
            return True
        if id(tensor) not in visited:
            visited.add(id(tensor))
            stack += tensor.op.inputs
    return False


@contextlib.contextmanager
def outside_functions() -> Iterator[None]:
    """Same as `tf.init_scope`, except that gradient tapes record in the context."""
    with tf.init_scope():
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
        try:
            yield
        finally:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()


def trace_inside(
    function: Callable[..., Any], specs: Sequence[tf.TensorSpec]
) -> tuple[Any, list[Any], list[tf.Tensor]]:
    """Traces a function that uses tensors of the graph that is being built, such as a backward pass.

    Returns the concrete function, for `call_with_captures`; its captures, with None in place of each tensor of the graph; and
    the captured tensors of the graph, in the same order.
    """

    def call_with_constants(*arguments: tf.Tensor) -> Any:
        with _replace_captures(_constant):
            return function(*arguments)

    concrete_function = tf.function(call_with_constants, autograph=False).get_concrete_function(*specs)
    captures = {id(inner): outer for outer, inner in ops.get_default_graph().captures}
    inputs = concrete_function.captured_inputs
    sources = [captures.get(id(t), None if hasattr(t, "graph") else t) for t in inputs]
    return concrete_function, sources, [t for t, source in zip(inputs, sources, strict=True) if source is None]


def call_with_captures(function: Any, arguments: Sequence[tf.Tensor], captures: Sequence[Any]) -> list[tf.Tensor]:
    """Calls a concrete function with other values for its captures."""
    return list(function._call_flat(list(arguments), list(captures)))


def replace_captures(replace: Callable[[tf.Tensor], tf.Tensor]) -> Context:
    """Context in which `replace` is applied to eager tensors that the traced function captures."""

    def replace_value(tensor: tf.Tensor) -> tf.Tensor:
        is_value = isinstance(tensor, core.Value) and tensor.dtype in dtypes.TF_VALUE_DTYPES
        return replace(tensor) if is_value else tensor

    return _replace_captures(replace_value)


def _constant(tensor: tf.Tensor) -> tf.Tensor:
    """Converts a tensor of another graph to a constant if its static value is known."""
    is_value = isinstance(tensor, core.Symbol) and tensor.dtype in dtypes.TF_VALUE_DTYPES  # not a resource handle
    value = tf.get_static_value(tensor) if is_value else None
    return tensor if value is None else tf.constant(value, tensor.dtype)


@contextlib.contextmanager
def _replace_captures(replace: Callable[[tf.Tensor], tf.Tensor]) -> Iterator[None]:
    graph = ops.get_default_graph()
    capture = graph.capture

    def capture_replacement(tensor: tf.Tensor, *args: Any, **kwargs: Any) -> tf.Tensor:
        replacement = replace(tensor)
        return replacement if getattr(replacement, "graph", None) is graph else capture(replacement, *args, **kwargs)

    graph.capture = capture_replacement  # a graph has no `__dict__`, which `patched` needs
    try:
        yield
    finally:
        del graph.capture


@contextlib.contextmanager
def outside_scopes() -> Iterator[None]:
    """Context outside of all tf.distribute scopes and without the caller's variable creators.

    Variables that Keras and callbacks create here, such as those of the temporary optimizer in Keras's first save, belong only
    to this process.
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
def enable_float_conversion() -> None:
    """Enables conversion of tf.distribute's variables to numbers, such as `float(learning_rate)`."""
    for name, kind in (("__int__", int), ("__float__", float)):
        if name not in values.DistributedVariable.__dict__:
            setattr(values.DistributedVariable, name, lambda variable, kind=kind: kind(variable.numpy()))


_inlining_threads = [0]  # number of replica threads inside `inline_functions`


@contextlib.contextmanager
def inline_functions() -> Iterator[None]:
    """Context in which a call of a `tf.function` is traced into its caller, and earlier traces are not reused."""
    _inlining_threads[0] += 1
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        _inlining_threads[0] -= 1
        if not _inlining_threads[0]:
            tf.config.run_functions_eagerly(False)


def is_in_current_function(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor belongs to the function that is being traced, including its conditionals and loops.

    A `tf.function` that this function calls is excluded: its trace is reused for other callers, whose tensors differ.
    """
    tensor_graph = getattr(tensor, "graph", None)  # None for eager tensors
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not tensor_graph and isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph):
        graph = graph.outer_graph
    return graph is tensor_graph


def is_in_keras_function() -> bool:
    """Returns whether a function of Keras's `fit`, `evaluate` or `predict` is being traced, recognized by its name."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None and "_step_on_" not in getattr(graph, "name", ""):
        graph = getattr(graph, "outer_graph", None)
    return graph is not None


without_gradient_recording = record.stop_recording  # returns a context in which gradient tapes do not record


@contextlib.contextmanager
def without_memory_optimizer() -> Iterator[None]:
    """Context in which functions are compiled without TensorFlow's memory optimizer, which has no public option.

    It estimates costs before it looks at the size of a device's memory.
    """
    options = context.context().function_call_options
    context.context().function_call_options = _without_memory_optimizer(
        options.executor_type, options.config_proto_serialized
    )
    try:
        yield
    finally:
        context.context().function_call_options = options


@functools.cache  # a program is called for each step, and the options rarely change
def _without_memory_optimizer(executor_type: str | None, serialized: bytes) -> context.FunctionCallOptions:
    config = tf.compat.v1.ConfigProto.FromString(serialized)
    config.graph_options.rewrite_options.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    return context.FunctionCallOptions(executor_type, config)


def wait_for_devices() -> None:
    """Blocks until all devices have finished, but lets other Python threads run; fetching from DTensor would hold the GIL."""
    context.context().sync_executors()


def operations_of(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Yields every operation of a graph, including those inside its loops, branches and functions."""
    yield from graph.get_operations()
    for function in graph._functions.values():
        yield from operations_of(function.graph)


def add_functions(source: tf.Graph) -> None:
    """Adds the functions that a graph calls to the function that is being traced, which keeps them alive.

    `tf.graph_util.import_graph_def` would add copies that the runtime does not know.
    """
    graph = tf.compat.v1.get_default_graph()
    for function in source._functions.values():
        graph._add_function_recursive(function)


def always_run(tensor: tf.Tensor) -> tf.Tensor:
    """Ensures that the function being traced always runs the operation of a tensor; returns the tensor.

    TensorFlow ensures this for most operations with side effects, but not for random numbers and broadcasts.
    """
    graph = tf.compat.v1.get_default_graph()
    if not tf.executing_eagerly() and hasattr(graph, "control_outputs"):
        graph.control_outputs.append(tensor.op)
    return tensor


def set_first_collective_key(key: int) -> None:
    """Sets the first group key that a later `MultiWorkerMirroredStrategy` uses for its devices."""
    tf.distribute.MultiWorkerMirroredStrategy._collective_key_base = key
