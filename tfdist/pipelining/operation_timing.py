"""Measures how long each call of a model takes on this device, for a balance by time."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.pipelining.operation_graph import AbstractRun, Call, Graph, run_abstractly

_LEAST_CALLS, _LEAST_SECONDS = 5, 0.02  # of a measurement


def measure_seconds(graph: Graph, *, rows: int = 1) -> list[float]:
    """Returns the seconds of a separate forward and backward pass of each call, compiled, on this device.

    Calls of equal layers with inputs of equal shapes are measured once. Variables need no values: they and the inputs are
    small random numbers, of one call at a time. Costs about 7 steps, and a trace and 20 ms for each different call.

    Args:
      graph: graph of the model.
      rows: rows of a micro-batch.

    Returns:
      One number for each of `graph.calls`, from 0. Ranks that measure differ: let one measure for all.
    """
    run = run_abstractly(graph, rows)
    overhead = least_seconds(tf.function(tf.identity), [tf.zeros([])])
    seconds_by_key: dict[str, float] = {}
    seconds = []
    for i, call in enumerate(graph.calls):
        key = _key(graph, run, i)
        if key not in seconds_by_key:
            seconds_by_key[key] = 0.0 if call.is_entry else max(_seconds(graph, run, i) - overhead, 0.0)
        seconds.append(seconds_by_key[key])
    return seconds


def _key(graph: Graph, run: AbstractRun, index: int) -> str:
    """Returns a text that is equal for calls that take equally long."""
    call = graph.calls[index]
    if call.layer is None:
        return str(index)
    try:
        config = {name: value for name, value in call.layer.get_config().items() if name != "name"}
        text = json.dumps(config, sort_keys=True, default=repr)
    except NotImplementedError:
        return str(index)
    inputs = [(run.shapes[x], graph.tensors[x].dtype, x in run.trained) for x in call.inputs]
    variables = [(*variable.shape, variable.dtype, variable.trainable) for variable in run.usage[index].read.values()]
    is_rematerialized = keras_internals.is_rematerialized(call.layer)
    return str((type(call.layer), text, call.options, inputs, variables, is_rematerialized))


def _seconds(graph: Graph, run: AbstractRun, index: int) -> float:
    call = graph.calls[index]
    variables = list(run.usage[index].read.values())
    inputs = [small_numbers(graph.tensors[x].dtype, run.shapes[x]) for x in call.inputs]
    values = [small_numbers(variable.dtype, variable.shape) for variable in variables]
    return least_seconds(_pass(graph, run, call, index, variables), [*inputs, *values])


def _pass(
    graph: Graph, run: AbstractRun, call: Call, index: int, variables: Sequence[keras.Variable]
) -> Callable[..., Any]:
    """Returns a compiled function of the inputs and variables of a call: its forward and backward pass."""

    def forward(tensors: Sequence[tf.Tensor], training: bool) -> list[tf.Tensor]:
        values: dict[int, Any] = {}
        for x, tensor in zip(call.inputs, tensors, strict=True):
            values[x] = tf.identity(tensor)
            if x in run.masks_seen[index] and x in run.mask_shapes:
                shape, dtype = run.mask_shapes[x]
                sizes = [run.shapes[x][i] if size is None else size for i, size in enumerate(shape)]
                keras_internals.set_mask_and_logits(values[x], tf.ones(sizes, dtype), None)
        call.run(values, training)
        return [values[x] for x in call.outputs]

    body = keras_internals.Body("measured", graph.model, [call.layer] if call.layer else [], forward)

    def step(*tensors: tf.Tensor) -> Any:
        inputs, values = tensors[: len(call.inputs)], tensors[len(call.inputs) :]
        sources = [tensor for tensor, x in zip(inputs, call.inputs, strict=True) if x in run.trained]
        sources += [value for value, variable in zip(values, variables, strict=True) if variable.trainable]
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return forward_and_backward(lambda: body(list(inputs), training=True), sources)

    return tf.function(step, autograph=False)


def forward_and_backward(forward: Callable[[], Sequence[tf.Tensor]], sources: Sequence[tf.Tensor]) -> Any:
    """Returns the results of a forward pass, and the gradients of their sum with respect to sources."""
    with tf.GradientTape() as tape:
        tape.watch(sources)
        results = forward()
    targets = [x for x in results if x.dtype.is_floating]
    gradients = tape.gradient(targets, sources) if targets and sources else []
    return results, [x for x in gradients if x is not None]


def small_numbers(dtype: str, shape: Sequence[int]) -> tf.Tensor:
    """Returns random numbers in [0.01, 0.1), or zeros of other dtypes."""
    kind = tf.as_dtype(dtype)
    if not kind.is_floating:
        return tf.zeros(shape, kind)
    return tf.cast(tf.random.stateless_uniform(list(shape), seed=[0, 1], minval=0.01, maxval=0.1), kind)


def least_seconds(function: Callable[..., Any], inputs: Sequence[tf.Tensor]) -> float:
    """Returns the least seconds of a call of a compiled function, of at least 5 calls and 20 ms."""
    function(*inputs)  # traces
    function(*inputs)
    times: list[float] = []
    while len(times) < _LEAST_CALLS or sum(times) < _LEAST_SECONDS:
        start = time.perf_counter()
        keras.tree.map_structure(_wait, function(*inputs))
        times.append(time.perf_counter() - start)
    return min(times)


def _wait(result: Any) -> None:
    (result.values if isinstance(result, tf.IndexedSlices) else result).numpy()
