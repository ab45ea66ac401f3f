"""The cost of computing a stage, and the shapes of the tensors that cross between stages."""

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.pipelining.cut_points import Crossing
from tfdist.pipelining.cutting import Cut, StageGraph
from tfdist.pipelining.operation_graph import AbstractRun, Call, Graph, Tensor, run_abstractly

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


class CrossingSpec(NamedTuple):
    """A tensor that crosses from a stage to the next, for a micro-batch.

    Attributes:
      spec: its static shape and dtype.
      has_gradient: whether its gradient is sent back.
    """

    spec: tf.TensorSpec
    has_gradient: bool


def crossing_specs(crossings: Sequence[Crossing], rows: int) -> list[CrossingSpec]:
    """Returns the tensors that cross between two stages for a number of rows.

    Raises:
      InputError: another size is unknown.
    """
    kind = "Tensors between the stages of a pipeline"
    return [CrossingSpec(spec_of(each, rows, kind), each.has_gradient) for each in crossings]


def with_static_shapes(tensors: Sequence[tf.Tensor], crossings: Sequence[CrossingSpec]) -> list[tf.Tensor]:
    """Returns tensors with the static shapes of crossings, which some operations, such as those on text, do not keep."""
    pairs = zip(tensors, crossings, strict=True)
    return [x if x.shape.is_fully_defined() else tf.ensure_shape(x, crossing.spec.shape) for x, crossing in pairs]


def spec_of(tensor: Crossing | Tensor, rows: int, kind: str) -> tf.TensorSpec:
    """Returns the static shape and the dtype of a tensor for a number of rows.

    Args:
      tensor: its first size is None if it is the number of rows.
      rows: number of rows.
      kind: the kind of the tensor, for the error.

    Raises:
      InputError: another size is unknown.
    """
    shape = [rows, *tensor.shape[1:]] if tensor.shape[:1] == (None,) else [*tensor.shape]
    if None in shape:
        raise InputError(
            f"{kind} need static shapes. Received: {tensor.name} of shape {tensor.shape}. Give keras.Input its sizes."
        )
    return tf.TensorSpec(shape, tensor.dtype)


class StageSeconds(NamedTuple):
    """The times in which a stage computes one micro-batch.

    Attributes:
      forward: seconds of the forward pass.
      backward: seconds of the backward pass.
    """

    forward: float
    backward: float


class StageOperations(NamedTuple):
    """The operations of a stage in the forward pass of one micro-batch.

    Attributes:
      operations: number of multiplications and additions.
      has_loops: whether there are loops, whose operations are not counted.
    """

    operations: int
    has_loops: bool


def measure_stage(cut: Cut, stage: StageGraph, rows: int) -> StageSeconds:
    """Measures the forward and the backward pass of one stage, compiled, on this device.

    Its variables and inputs are small random numbers. Costs two traces, and about 14 micro-batches.

    Args:
      cut: the cut model.
      stage: one of its stages.
      rows: rows of a micro-batch.

    Raises:
      InputError: a size is unknown.
    """
    function = _StageFunction(cut, stage, rows)
    tensors = [small_numbers(spec.dtype.name, spec.shape.as_list()) for spec in function.specs]
    overhead = least_seconds(tf.function(tf.identity), [tf.zeros([])])
    forward = least_seconds(tf.function(function.forward, autograph=False), tensors) - overhead
    both = least_seconds(tf.function(function.forward_and_backward, autograph=False), tensors) - overhead
    return StageSeconds(max(forward, 0.0), max(both - forward, 0.0))


def count_operations(cut: Cut, stage: StageGraph, rows: int) -> StageOperations:
    """Counts the operations of a stage without computing anything.

    Two for each product in matrix products and convolutions; one for each element of another result.

    Args:
      cut: the cut model.
      stage: one of its stages.
      rows: rows of a micro-batch.

    Raises:
      InputError: a size is unknown.
    """
    function = _StageFunction(cut, stage, rows)
    graph = keras_internals.new_trace()
    with graph.as_default():
        function.forward(*(tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in function.specs))
    operations = graph.get_operations()
    return StageOperations(
        sum(_operations(each) for each in operations), any(each.type in _LOOPS for each in operations)
    )


class _StageFunction:
    """A stage as a function of its inputs, its received tensors, and the values of its variables."""

    def __init__(self, cut: Cut, stage: StageGraph, rows: int):
        self._stage = stage
        variables = stage.variables
        self._variables = [*variables.all, *variables.metrics, *variables.others]
        inputs = [cut.graph.tensors[cut.graph.inputs[name]] for name in stage.inputs]
        received = crossing_specs(stage.received, rows)
        self._has_gradient = [crossing.has_gradient for crossing in received]
        self.specs = [
            *(spec_of(tensor, rows, "The inputs of a pipeline") for tensor in inputs),
            *(crossing.spec for crossing in received),
            *(tf.TensorSpec(variable.shape, variable.dtype) for variable in self._variables),
        ]

    def forward(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors that the stage sends; for the last stage, the outputs of the model."""
        inputs, received, values = self._parts(tensors)
        with keras.StatelessScope(state_mapping=list(zip(self._variables, values, strict=True))):
            outputs, sent = self._stage.call(inputs, received, training=True)
        return [x for x in [*keras.tree.flatten(outputs), *sent] if x is not None]

    def forward_and_backward(self, *tensors: tf.Tensor) -> Any:
        """Returns the results of `forward`, and the gradients of received tensors and of the variables."""
        _, received, values = self._parts(tensors)
        sources = [x for x, has_gradient in zip(received, self._has_gradient, strict=True) if has_gradient]
        sources += [x for x, variable in zip(values, self._variables, strict=True) if variable.trainable]
        return forward_and_backward(lambda: self.forward(*tensors), sources)

    def _parts(
        self, tensors: Sequence[tf.Tensor]
    ) -> tuple[dict[str, tf.Tensor], Sequence[tf.Tensor], Sequence[tf.Tensor]]:
        names, end = self._stage.inputs, len(self._stage.inputs) + len(self._has_gradient)
        return dict(zip(names, tensors, strict=False)), tensors[len(names) : end], tensors[end:]


_LOOPS = ("While", "StatelessWhile")
_FREE = frozenset("Const Placeholder Identity IdentityN Reshape Squeeze ExpandDims Shape NoOp".split())


def _operations(operation: tf.Operation) -> int:
    if operation.type in _FREE:
        return 0
    elements = sum(x.shape.num_elements() or 0 for x in operation.outputs if x.shape.rank is not None)
    return elements * 2 * _products(operation) if operation.type in _PRODUCTS else elements


def _products(operation: tf.Operation) -> int:
    """Returns the number of products of which each element of a result is the sum."""
    first, second = (x.shape for x in operation.inputs[:2])
    return _PRODUCTS[operation.type](operation, first, second)


def _of_einsum(operation: tf.Operation, first: tf.TensorShape, second: tf.TensorShape) -> int:
    operands, _, result = operation.get_attr("equation").decode().partition("->")
    sizes: dict[str, int] = {}
    for labels, shape in zip(operands.split(","), (first, second), strict=False):
        before, _, after = labels.partition("...")
        sizes.update(zip(before, shape, strict=False))
        sizes.update(zip(reversed(after), reversed(shape.as_list()), strict=False))
    count = 1
    for label, size in sizes.items():
        count *= 1 if label in result else size or 1
    return count


_PRODUCTS: dict[str, Any] = {
    "MatMul": lambda x, a, b: a[0 if x.get_attr("transpose_a") else 1] or 1,
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2"), lambda x, a, b: a[-2 if x.get_attr("adj_x") else -1] or 1),
    **dict.fromkeys(("Conv2D", "Conv3D"), lambda x, a, b: b[:-1].num_elements() or 1),
    "DepthwiseConv2dNative": lambda x, a, b: b[:2].num_elements() or 1,
    "Einsum": _of_einsum,
}
