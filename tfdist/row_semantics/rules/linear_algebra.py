"""Matrix products and other contractions, operations of neural networks, and random numbers."""

import dataclasses
from collections.abc import Callable, Sequence

from tfdist.row_semantics.rules.elementwise import pointwise, product_of, sum_of
from tfdist.row_semantics.rules.registry import RULES, Call, rule
from tfdist.row_semantics.rules.shapes import broadcast
from tfdist.row_semantics.sizes import ONE, Size
from tfdist.row_semantics.values import (
    ALL_ROWS,
    REPLICATED,
    ZEROS,
    Dims,
    Label,
    NoRuleError,
    Partial,
    Replicated,
    Rows,
    Value,
    broadcast_dim,
    is_zero,
    power_of,
)

_LETTERS = "abcdefgh"  # for the batch dims of matrices


def contraction(values: Sequence[Value], letters: Sequence[str], output: str) -> Label:
    """Returns the label of a sum of products.

    Args:
      values: the factors.
      letters: for each factor, one letter per dim.
      output: letters of the result; the other dims are summed.
    """
    labels = [value.label for value in values]
    rows = [(label, names[label.axis]) for label, names in zip(labels, letters, strict=True) if isinstance(label, Rows)]
    if not rows:
        factors = sorted(values, key=lambda value: not isinstance(value.label, Partial))
        return product_of(factors, [1] * len(values))
    if any(not isinstance(label, Replicated | Rows) for label in labels):
        return ALL_ROWS
    (label_of_rows, name), *_ = rows
    if len({other for _, other in rows}) > 1 or len({label.size for label, _ in rows}) > 1:
        return ALL_ROWS
    for value, names in zip(values, letters, strict=True):
        if isinstance(value.label, Replicated) and name in names and value.known_dims[names.index(name)] != ONE:
            return ALL_ROWS
    power = None if all(map(is_zero, labels)) else sum(map(power_of, labels))
    if name in output:
        return Rows(output.index(name), label_of_rows.size, power)
    return ZEROS if power is None else Partial("sum", power)


def _dims(values: Sequence[Value], letters: Sequence[str], output: str) -> Dims:
    """Returns the dims of the result, where dims of size 1 are broadcast."""
    dims: dict[str, set[Size | None]] = {name: set() for name in output}
    for value, names in zip(values, letters, strict=True):
        for dim, name in zip(value.known_dims, names, strict=True):
            dims.setdefault(name, set()).update({dim} - {ONE})
    return tuple(broadcast_dim(dims[name]) for name in output)


@rule("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3")
def _(call: Call) -> Value:
    left, right = call.inputs
    flags = ("transpose_a", "transpose_b") if call.kind == "MatMul" else ("adj_x", "adj_y")
    rank = max(left.rank, right.rank)
    names = [
        _LETTERS[rank - value.rank : rank - 2] + (matrix[::-1] if call.attribute(flag) else matrix)
        for value, matrix, flag in zip((left, right), ("ik", "kj"), flags, strict=True)
    ]
    output = _LETTERS[: rank - 2] + "ij"
    return Value(contraction(call.inputs, names, output), _dims(call.inputs, names, output))


@rule("Einsum")
def _(call: Call) -> Value:
    inputs, output = call.attribute("equation").decode().split("->")
    counts = [
        value.rank - len(labels.replace("...", ""))
        for value, labels in zip(call.inputs, inputs.split(","), strict=True)
    ]
    digits = "0123456789"[: max(counts)]  # the dims of an ellipsis
    names = [
        labels.replace("...", digits[len(digits) - n :]) for n, labels in zip(counts, inputs.split(","), strict=True)
    ]
    output = output.replace("...", digits)
    if any(len(set(labels)) < len(labels) for labels in (*names, output)):
        raise NoRuleError("a repeated letter in an equation")
    return Value(contraction(call.inputs, names, output), _dims(call.inputs, names, output))


@rule("Conv2DBackpropFilter", "DepthwiseConv2dNativeBackpropFilter", "Conv3DBackpropFilterV2")
def _(call: Call) -> Value:
    """Sums the products of an input and a gradient over rows and positions."""
    value, shape, gradient = call.inputs
    if any(isinstance(x.label, Rows) and x.label.axis for x in (value, gradient)) or not shape.is_replicated:
        raise NoRuleError("the rows are not the first axis")
    names = "a" + _LETTERS[1 : value.rank]
    return Value(contraction([value, gradient], [names, names], ""))


@rule("BiasAddGrad")
def _(call: Call) -> Value:
    (value,) = call.inputs
    names = _LETTERS[: value.rank]
    channel = names[1] if call.attribute("data_format") == b"NCHW" else names[-1]
    return Value(contraction([value], [names], channel))


@rule(
    *("MatrixInverse", "Cholesky", "MatrixDeterminant", "LogMatrixDeterminant", "Qr", "Svd", "SelfAdjointEigV2"),
    *("FFT", "IFFT", "RFFT", "IRFFT", "FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D"),
)
def _(call: Call) -> Value:
    """Functions of each matrix, or of each vector."""
    value, *lengths = call.inputs
    inner = 1 if call.kind.endswith("FFT") else 2
    if not isinstance(value.label, Rows) or value.label.power or value.label.axis >= value.rank - inner:
        raise NoRuleError("the matrix depends on several rows")
    if not all(length.is_replicated for length in lengths):
        raise NoRuleError("the length depends on rows")
    return Value(value.label)


@rule("MatrixSolve", "MatrixTriangularSolve")
def _(call: Call) -> Value:
    matrix, right = call.inputs
    label = right.label
    if not isinstance(label, Rows) or matrix.rank != right.rank or label.axis >= right.rank - 2:
        raise NoRuleError("the matrix depends on several rows")
    if pointwise([matrix]) != Rows(label.axis, label.size):
        raise NoRuleError("the matrices and the right-hand sides have different rows")
    return Value(label, right.dims)


@rule("BiasAdd")
def _(call: Call) -> Value:
    return Value(sum_of(call.inputs), call.inputs[0].dims)


def row_rule(
    *rows: int, linear: int | None = None, shape: int | None = None, inner: int = 1
) -> Callable[[Call], list[Value]]:
    """Returns the rule of an operation on each row of the first axis.

    Args:
      rows: positions of the inputs with rows; the others must be replicated.
      linear: position of an input in which the operation is linear, whose power of COUNT the result keeps.
      shape: position of a shape, which may contain the number of rows.
      inner: minimum number of axes of one row in the first input with rows.
    """

    def apply(call: Call) -> list[Value]:
        labels = [call.inputs[number].label for number in rows]
        if not all(isinstance(label, Rows) and not label.axis and label.size == labels[0].size for label in labels):  # type: ignore[union-attr]
            raise NoRuleError("an input does not have the rows along its first axis")
        if not all(value.is_replicated for number, value in enumerate(call.inputs) if number not in (*rows, shape)):
            raise NoRuleError("an input that should be replicated is not")
        if any(call.inputs[number].label.power for number in rows if number != linear):  # type: ignore[union-attr]
            raise NoRuleError("an input is divided by the number of rows")
        if call.inputs[rows[0]].rank <= inner:
            raise NoRuleError("the rows are rows of one matrix")
        label = Rows(0, labels[0].size, 0 if linear is None else call.inputs[linear].label.power)  # type: ignore[union-attr]
        return [Value(label, (label.size, *[None] * (tensor.shape.rank - 1))) for tensor in call.operation.outputs]

    return apply


_ROW_RULES = {
    "Conv2D Conv3D DepthwiseConv2dNative AvgPool AvgPool3D ResizeBilinear ResizeNearestNeighbor ResizeBicubic "
    "ScaleAndTranslate SpaceToDepth DepthToSpace ExtractImagePatches ResizeNearestNeighborGrad": row_rule(0, linear=0),
    "ResizeBilinearGrad ResizeBicubicGrad": row_rule(0, 1, linear=0),
    "MaxPool MaxPool3D MaxPoolV2 RGBToHSV HSVToRGB AdjustHue AdjustSaturation": row_rule(0),
    "AdjustContrastv2": row_rule(0, inner=3),
    "MatrixSetDiagV3": row_rule(0, 1, inner=2),
    "Conv2DBackpropInput DepthwiseConv2dNativeBackpropInput Conv3DBackpropInputV2": row_rule(2, linear=2, shape=0),
    "AvgPoolGrad AvgPool3DGrad": row_rule(1, linear=1, shape=0),
    "MaxPoolGrad MaxPool3DGrad": row_rule(0, 1, 2, linear=2),
}
for _types, _rule in _ROW_RULES.items():
    RULES |= dict.fromkeys(_types.split(), _rule)


@rule("ImageProjectiveTransformV3")
def _(call: Call) -> Value:
    """It is linear if the fill value is zero."""
    images, _, shape, filling = call.inputs
    (result,) = row_rule(0, 1, linear=0 if is_zero(filling.label) else None)(call)
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


# Random numbers: for rows, replicas draw different numbers from the same distribution; otherwise equal ones, by a common seed.


@rule(
    *("RandomUniform", "RandomStandardNormal", "TruncatedNormal", "RandomUniformInt"),
    *(
        f"StatelessRandom{law}{version}"
        for law in "Uniform Normal UniformInt UniformFullInt".split()
        for version in ("", "V2")
    ),
    *("StatelessTruncatedNormal", "StatelessTruncatedNormalV2", "StatelessRandomGammaV3"),
)
def _(call: Call) -> Value:
    shape, *parameters = call.inputs
    if not all(value.is_replicated for value in parameters):
        raise NoRuleError("the seed or the bounds of random numbers depend on rows")
    if shape.numbers is not None:
        return broadcast(Value(REPLICATED, ()), tuple(shape.numbers))
    if not shape.is_replicated:
        raise NoRuleError("the shape of random numbers is unknown")
    return Value(REPLICATED)


@rule("StatelessMultinomial", "Multinomial")
def _(call: Call) -> Value:
    logits, *parameters = call.inputs
    if not all(value.is_replicated for value in parameters):
        raise NoRuleError("the seed or the number of samples depends on rows")
    label = pointwise([logits])
    if isinstance(label, Rows) and label.axis:
        raise NoRuleError("the distribution depends on several rows")
    return Value(label, (logits.known_dims[0], None))


@rule("RandomShuffle")
def _(call: Call) -> Value:
    if not call.is_replicated:
        raise NoRuleError("rows are shuffled")
    return Value(REPLICATED, call.inputs[0].dims)
