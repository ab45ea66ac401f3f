"""The cost of computing a stage, and the shapes of the tensors that cross between stages."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.pipelining.cut_points import Crossing
from tfdist.pipelining.cutting import Cut, StageGraph
from tfdist.pipelining.operation_graph import Tensor
from tfdist.pipelining.operation_timing import forward_and_backward, least_seconds, small_numbers


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
