"""Operations of neural networks on the rows of the first axis, and their gradients."""

import dataclasses
from collections.abc import Callable

from tfdist.row_semantics.labels import Rows, is_zero
from tfdist.row_semantics.rules.elementwise import pointwise, sum_of
from tfdist.row_semantics.rules.registry import RULES, Call, rule
from tfdist.row_semantics.values import NoRuleError, Value


@rule("BiasAdd")
def _(call: Call) -> Value:
    return Value(sum_of(call.inputs), call.inputs[0].dims)


def on_rows(
    *rows: int, linear: int | None = None, shape: int | None = None, inner: int = 1
) -> Callable[[Call], list[Value]]:
    """Returns the rule of an operation on each row of the first axis.

    Args:
      rows: positions of the inputs that have the rows; the others must be replicated.
      linear: position of one in which the operation is linear, so that it keeps its power of COUNT.
      shape: position of a shape, which may name the number of rows.
      inner: number of axes of the first of them that belong to one row, at least.
    """

    def apply(call: Call) -> list[Value]:
        labels = [call.inputs[number].label for number in rows]
        if not all(isinstance(each, Rows) and not each.axis and each.size == labels[0].size for each in labels):  # type: ignore[union-attr]
            raise NoRuleError("an input does not have the rows along its first axis")
        if not all(value.is_replicated for number, value in enumerate(call.inputs) if number not in (*rows, shape)):
            raise NoRuleError("an input that should be replicated is not")
        if any(call.inputs[number].label.power for number in rows if number != linear):  # type: ignore[union-attr]
            raise NoRuleError("an input is divided by the number of rows")
        if call.inputs[rows[0]].rank <= inner:
            raise NoRuleError("the rows are rows of one matrix")
        label = Rows(0, labels[0].size, 0 if linear is None else call.inputs[linear].label.power)  # type: ignore[union-attr]
        return [Value(label, (label.size, *[None] * (each.shape.rank - 1))) for each in call.operation.outputs]

    return apply


_ON_ROWS = {
    "Conv2D Conv3D DepthwiseConv2dNative AvgPool AvgPool3D ResizeBilinear ResizeNearestNeighbor ResizeBicubic "
    "ScaleAndTranslate SpaceToDepth DepthToSpace ExtractImagePatches ResizeNearestNeighborGrad": on_rows(0, linear=0),
    "ResizeBilinearGrad ResizeBicubicGrad": on_rows(0, 1, linear=0),
    "MaxPool MaxPool3D MaxPoolV2 RGBToHSV HSVToRGB AdjustHue AdjustSaturation": on_rows(0),
    "AdjustContrastv2": on_rows(0, inner=3),
    "MatrixSetDiagV3": on_rows(0, 1, inner=2),
    "Conv2DBackpropInput DepthwiseConv2dNativeBackpropInput Conv3DBackpropInputV2": on_rows(2, linear=2, shape=0),
    "AvgPoolGrad AvgPool3DGrad": on_rows(1, linear=1, shape=0),
    "MaxPoolGrad MaxPool3DGrad": on_rows(0, 1, 2, linear=2),
}
for _types, _rule in _ON_ROWS.items():
    RULES |= dict.fromkeys(_types.split(), _rule)


@rule("ImageProjectiveTransformV3")
def _(call: Call) -> Value:
    """It is linear if what fills it is zero."""
    images, _, shape, filling = call.inputs
    (result,) = on_rows(0, 1, linear=0 if is_zero(filling.label) else None)(call)
    size, *_, channels = images.known_dims
    return dataclasses.replace(result, dims=(size, *shape.known_numbers, channels))


@rule("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")
def _(call: Call) -> list[Value]:
    """Losses of rows, and their gradients with respect to the logits."""
    logits, labels = call.inputs
    first = logits.label
    if not isinstance(first, Rows) or any(pointwise([v]) != Rows(0, first.size) for v in call.inputs):
        raise NoRuleError("labels and logits do not have the same rows along the first axis")
    label = Rows(0, first.size)
    return [Value(label, logits.known_dims[:1]), Value(label, logits.dims)]
