"""Operations of neural networks on the rows of the first axis, and their gradients."""

from collections.abc import Sequence

from tfdist.row_semantics.labels import ALL_ROWS, REPLICATED, Replicated, Rows
from tfdist.row_semantics.rules.elementwise import sum_of
from tfdist.row_semantics.rules.registry import RULES, Call, Rule, rule
from tfdist.row_semantics.values import NoRuleError, Value


@rule("BiasAdd")
def _(call: Call) -> Value:
    value, bias = call.inputs
    if call.attribute("data_format") == b"NCHW":
        if not bias.is_replicated or not isinstance(value.label, Rows) or value.label.axis == 1:
            raise NoRuleError("a bias of channels that are not the last axis")
        return Value(value.label if not value.label.power else ALL_ROWS, value.dims)
    return Value(sum_of([value, bias]), value.dims)


def on_rows(rows: Sequence[int], linear: Sequence[int] = (), shapes: Sequence[int] = ()) -> Rule:
    """Returns the rule of an operation on each row of the first axis.

    Args:
      rows: positions of the inputs that have the rows; the others must be replicated.
      linear: positions of those in which the operation is linear: their powers of COUNT add up.
      shapes: positions of shapes, which may name the number of rows.
    """

    def apply(call: Call) -> list[Value]:
        outputs = len(call.operation.outputs)
        values = call.inputs
        if all(value.is_replicated or number in shapes for number, value in enumerate(values)):
            return [Value(REPLICATED)] * outputs
        labels = [values[number].label for number in rows]
        others = [value for number, value in enumerate(values) if number not in rows and number not in shapes]
        first = labels[0]
        if not isinstance(first, Rows) or any(not isinstance(each, Rows) or each.axis for each in labels):
            raise NoRuleError("an input has no rows along its first axis")
        if len({each.size for each in labels}) > 1 or not all(value.is_replicated for value in others):  # type: ignore[union-attr]
            raise NoRuleError("an input that should be replicated is not")
        power: int | None = 0
        for number in rows:
            own = values[number].label.power  # type: ignore[union-attr]
            if number in linear:
                power = None if power is None or own is None else power + own
            elif own:
                raise NoRuleError("an input is divided by the number of rows")
        dims = (first.size,)
        return [
            Value(Rows(0, first.size, power), (*dims, *[None] * (output.shape.rank - 1)) if output.shape.rank else None)
            for output in call.operation.outputs
        ]

    return apply


RULES |= dict.fromkeys(("Conv2D", "Conv3D", "DepthwiseConv2dNative"), on_rows([0], [0]))
RULES |= dict.fromkeys(("AvgPool", "AvgPool3D"), on_rows([0], [0]))
RULES |= dict.fromkeys(("MaxPool", "MaxPool3D", "MaxPoolV2"), on_rows([0]))
RULES |= dict.fromkeys(("SpaceToDepth", "DepthToSpace"), on_rows([0], [0]))
RULES |= dict.fromkeys(("ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ScaleAndTranslate"), on_rows([0]))
RULES |= dict.fromkeys(("ResizeBilinearGrad", "ResizeBicubicGrad"), on_rows([0, 1], [0]))
RULES["ResizeNearestNeighborGrad"] = on_rows([0], [0])
RULES["ExtractImagePatches"] = on_rows([0], [0])
RULES |= dict.fromkeys(("AdjustContrastv2", "RGBToHSV", "HSVToRGB", "AdjustHue", "AdjustSaturation"), on_rows([0]))
RULES["ImageProjectiveTransformV3"] = on_rows([0, 1])
RULES |= dict.fromkeys(
    ("Conv2DBackpropInput", "DepthwiseConv2dNativeBackpropInput", "Conv3DBackpropInputV2"),
    on_rows([2], [2], shapes=[0]),
)
RULES |= dict.fromkeys(("AvgPoolGrad", "AvgPool3DGrad"), on_rows([1], [1], shapes=[0]))
RULES |= dict.fromkeys(("MaxPoolGrad", "MaxPool3DGrad"), on_rows([0, 1, 2], [2]))
RULES["CTCLossV2"] = on_rows([])


@rule("SparseSoftmaxCrossEntropyWithLogits", "SoftmaxCrossEntropyWithLogits")
def _(call: Call) -> list[Value]:
    """Losses of rows, and their gradients with respect to the logits."""
    logits, labels = call.inputs
    if logits.is_replicated and labels.is_replicated:
        return [Value(Replicated())] * 2
    first = logits.label
    if not isinstance(first, Rows) or first.axis or any(value.label != Rows(0, first.size) for value in call.inputs):
        raise NoRuleError("labels and logits do not have the same rows along the first axis")
    return [Value(first, logits.known_dims[:1]), Value(first, logits.dims)]
