"""Measures and counts the costs of stages, and determines the shapes of the tensors between them."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.pipelining.cut_points import Crossing
from tfdist.pipelining.cutting import Cut, StageGraph
from tfdist.pipelining.operation_graph import Tensor
from tfdist.pipelining.operation_timing import forward_and_backward, min_call_seconds, small_numbers


class CrossingSpec(NamedTuple):
    """A tensor that a stage sends to the next one, for a micro-batch."""

    spec: tf.TensorSpec  # static shape and dtype
    has_gradient: bool  # whether its gradient is sent back


def crossing_specs(crossings: Sequence[Crossing], rows: int) -> list[CrossingSpec]:
    """Returns the tensors between two stages for a micro-batch of `rows` rows; raises `InputError` if a size is unknown."""
    kind = "Tensors between the stages of a pipeline"
    return [CrossingSpec(spec_of(crossing, rows, kind), crossing.has_gradient) for crossing in crossings]


def with_static_shapes(tensors: Sequence[tf.Tensor], crossings: Sequence[CrossingSpec]) -> list[tf.Tensor]:
    """Sets the static shapes of tensors, which some operations, such as those on text, do not keep."""
    pairs = zip(tensors, crossings, strict=True)
    return [x if x.shape.is_fully_defined() else tf.ensure_shape(x, crossing.spec.shape) for x, crossing in pairs]


def spec_of(tensor: Crossing | Tensor, rows: int, kind: str) -> tf.TensorSpec:
    """Returns the static shape and the dtype of a tensor, for a number of rows if its first size is None.

    Raises `InputError`, with the `kind` of the tensor, if another size is unknown.
    """
    shape = [rows, *tensor.shape[1:]] if tensor.shape[:1] == (None,) else [*tensor.shape]
    if None in shape:
        raise InputError(
            f"{kind} need static shapes. Received: {tensor.name} of shape {tensor.shape}. Pass all sizes to keras.Input."
        )
    return tf.TensorSpec(shape, tensor.dtype)


def measure_stage(cut: Cut, stage: StageGraph, rows: int) -> tuple[float, float]:
    """Measures the compiled forward and backward pass of one stage on this device, for a micro-batch of `rows` rows.

    Returns the seconds of the two passes. Variables and inputs are small random numbers. Takes as long as two traces and about
    14 micro-batches. Raises `InputError` if a size is unknown.
    """
    function, specs, is_source = _stage_function(cut, stage, rows)
    tensors = [small_numbers(spec.dtype.name, spec.shape.as_list()) for spec in specs]
    overhead = min_call_seconds(tf.function(tf.identity), [tf.zeros([])])
    forward = min_call_seconds(tf.function(function, autograph=False), tensors) - overhead
    total = min_call_seconds(forward_and_backward(function, is_source), tensors) - overhead
    return max(forward, 0.0), max(total - forward, 0.0)


def count_operations(cut: Cut, stage: StageGraph, rows: int) -> tuple[int, bool]:
    """Counts the multiplications and additions of the forward pass of a stage for a micro-batch, without computing anything.

    A product in a matrix product or convolution counts as two, an element of another result as one. Returns the count, and
    whether there are loops, whose operations are not counted. Raises `InputError` if a size is unknown.
    """
    function, specs, _ = _stage_function(cut, stage, rows)
    graph = keras_internals.new_trace()
    with graph.as_default():
        function(*(tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in specs))
    operations = graph.get_operations()
    return sum(map(_operations, operations)), any(x.type in _LOOP_TYPES for x in operations)


def _stage_function(
    cut: Cut, stage: StageGraph, rows: int
) -> tuple[Callable[..., list[tf.Tensor]], list[tf.TensorSpec], list[bool]]:
    """Returns a stage as a function of its inputs, its received tensors, and the values of its variables.

    It returns the tensors for the next stage; in the last stage, the outputs of the model. Also returns the specs of its
    arguments, and which of them have gradients.
    """
    variables = [*stage.variables.all, *stage.variables.metrics, *stage.variables.external]
    inputs = [cut.graph.tensors[cut.graph.inputs[name]] for name in stage.inputs]
    received, count = crossing_specs(stage.received, rows), len(inputs)

    def forward(*tensors: tf.Tensor) -> list[tf.Tensor]:
        named_inputs, values = dict(zip(stage.inputs, tensors, strict=False)), tensors[count + len(received) :]
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            outputs, sent = stage.call(named_inputs, tensors[count : count + len(received)], training=True)
        return [x for x in [*keras.tree.flatten(outputs), *sent] if x is not None]

    specs = [spec_of(tensor, rows, "The inputs of a pipeline") for tensor in inputs]
    specs += [crossing.spec for crossing in received] + [tf.TensorSpec(v.shape, v.dtype) for v in variables]
    return forward, specs, [False] * count + [x.has_gradient for x in received] + [v.trainable for v in variables]


_LOOP_TYPES = ("While", "StatelessWhile")
_FREE_TYPES = frozenset("Const Placeholder Identity IdentityN Reshape Squeeze ExpandDims Shape NoOp".split())


def _operations(operation: tf.Operation) -> int:
    if operation.type in _FREE_TYPES:
        return 0
    elements = sum(x.shape.num_elements() or 0 for x in operation.outputs if x.shape.rank is not None)
    if operation.type not in _PRODUCTS:
        return elements
    first, second = (x.shape for x in operation.inputs[:2])
    return elements * 2 * _PRODUCTS[operation.type](operation, first, second)


def _einsum_products(operation: tf.Operation, first: tf.TensorShape, second: tf.TensorShape) -> int:
    operands, _, result = operation.get_attr("equation").decode().partition("->")
    sizes: dict[str, int] = {}
    for labels, shape in zip(operands.split(","), (first, second), strict=False):
        leading_labels, _, trailing_labels = labels.partition("...")
        sizes.update(zip(leading_labels, shape, strict=False))
        sizes.update(zip(reversed(trailing_labels), reversed(shape.as_list()), strict=False))
    return math.prod(size or 1 for label, size in sizes.items() if label not in result)


# The number of products that are summed in each element of a result.
_PRODUCTS: dict[str, Any] = {
    "MatMul": lambda x, a, b: a[0 if x.get_attr("transpose_a") else 1] or 1,
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2"), lambda x, a, b: a[-2 if x.get_attr("adj_x") else -1] or 1),
    **dict.fromkeys(("Conv2D", "Conv3D"), lambda x, a, b: b[:-1].num_elements() or 1),
    "DepthwiseConv2dNative": lambda x, a, b: b[:2].num_elements() or 1,
    "Einsum": _einsum_products,
}
