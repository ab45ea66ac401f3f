"""Measures the time of each call of a model on this device, to balance stages by time."""

import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.pipelining.operation_graph import AbstractRun, Graph

_MIN_CALLS, _MIN_SECONDS = 5, 0.02  # in each measurement


def measure_seconds(graph: Graph, *, rows: int = 1) -> list[float]:
    """Measures the compiled forward and backward pass of each call on this device, in seconds.

    Equal layers with inputs of equal shapes are measured once. Variables need no values: small random numbers replace them
    and the inputs of one call at a time. Takes as long as about 7 steps, and a trace and 20 ms for each distinct call.
    Measurements differ between ranks, so one rank must measure for all.
    """
    run = AbstractRun(graph, rows)
    overhead = min_call_seconds(tf.function(tf.identity), [tf.zeros([])])
    seconds_by_key: dict[str, float] = {}
    seconds = []
    for i, call in enumerate(graph.calls):
        key = _measurement_key(run, i)
        if key not in seconds_by_key:
            seconds_by_key[key] = 0.0 if call.is_entry else max(_call_seconds(run, i) - overhead, 0.0)
        seconds.append(seconds_by_key[key])
    return seconds


def _measurement_key(run: AbstractRun, index: int) -> str:
    """Returns a key that is equal for calls of equal cost."""
    graph, call = run.graph, run.graph.calls[index]
    if call.layer is None:
        return str(index)
    try:
        config = {name: value for name, value in call.layer.get_config().items() if name != "name"}
        text = json.dumps(config, sort_keys=True, default=repr)
    except NotImplementedError:
        return str(index)
    inputs = [(run.shapes[x], graph.tensors[x].dtype, x in run.differentiable) for x in call.inputs]
    variables = [(*variable.shape, variable.dtype, variable.trainable) for variable in run.usage[index].reads.values()]
    is_rematerialized = keras_internals.is_rematerialized(call.layer)
    return str((type(call.layer), text, call.options, inputs, variables, is_rematerialized))


def _call_seconds(run: AbstractRun, index: int) -> float:
    """Measures a compiled function that computes the forward and backward pass of a call from its inputs and variables."""
    graph, call, variables = run.graph, run.graph.calls[index], list(run.usage[index].reads.values())

    def forward(tensors: Sequence[tf.Tensor], training: bool) -> list[tf.Tensor]:
        values: dict[int, Any] = {}
        for x, tensor in zip(call.inputs, tensors, strict=True):
            values[x] = tf.identity(tensor)
            if x in run.masked_call_inputs[index] and x in run.mask_shapes:
                shape, dtype = run.mask_shapes[x]
                sizes = [run.shapes[x][i] if size is None else size for i, size in enumerate(shape)]
                keras_internals.set_mask_and_logits(values[x], tf.ones(sizes, dtype), None)
        call.run(values, training)
        return [values[x] for x in call.outputs]

    body = keras_internals.Body("measured", graph.model, [call.layer] if call.layer else [], forward)

    def run_body(*tensors: tf.Tensor) -> list[tf.Tensor]:
        inputs, values = tensors[: len(call.inputs)], tensors[len(call.inputs) :]
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return body(list(inputs), training=True)

    is_source = [x in run.differentiable for x in call.inputs] + [variable.trainable for variable in variables]
    arguments = [small_numbers(graph.tensors[x].dtype, run.shapes[x]) for x in call.inputs]
    arguments += [small_numbers(variable.dtype, variable.shape) for variable in variables]
    return min_call_seconds(forward_and_backward(run_body, is_source), arguments)


def forward_and_backward(forward: Callable[..., Sequence[tf.Tensor]], is_source: Sequence[bool]) -> Callable[..., Any]:
    """Compiles a forward pass with the gradients of the sum of its results with respect to some of its arguments."""

    def step(*tensors: tf.Tensor) -> Any:
        sources = list(itertools.compress(tensors, is_source))
        with tf.GradientTape() as tape:
            tape.watch(sources)
            results = forward(*tensors)
        targets = [x for x in results if x.dtype.is_floating]
        gradients = tape.gradient(targets, sources) if targets and sources else []
        return results, [x for x in gradients if x is not None]

    return tf.function(step, autograph=False)


def small_numbers(dtype: str, shape: Sequence[int]) -> tf.Tensor:
    """Returns random numbers in [0.01, 0.1), or zeros if the dtype is not floating-point."""
    tf_dtype = tf.as_dtype(dtype)
    if not tf_dtype.is_floating:
        return tf.zeros(shape, tf_dtype)
    return tf.cast(tf.random.stateless_uniform(list(shape), seed=[0, 1], minval=0.01, maxval=0.1), tf_dtype)


def min_call_seconds(function: Callable[..., Any], inputs: Sequence[tf.Tensor]) -> float:
    """Returns the minimum time of a call of a compiled function, over at least 5 calls and 20 ms."""
    function(*inputs)  # traces
    function(*inputs)
    times: list[float] = []
    while len(times) < _MIN_CALLS or sum(times) < _MIN_SECONDS:
        start = time.perf_counter()
        for result in tf.nest.flatten(function(*inputs), expand_composites=True):
            result.numpy()
        times.append(time.perf_counter() - start)
    return min(times)
