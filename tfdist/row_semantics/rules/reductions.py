"""Rules for reductions, operations along an axis, contractions such as matrix products, neural networks, and random numbers."""

import dataclasses
from collections.abc import Callable, Sequence

from tfdist.row_semantics import sizes
from tfdist.row_semantics.rules.elementwise import linear, pointwise, product_of, sum_of
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
    Reduction,
    Replicated,
    Rows,
    Value,
    broadcast_dim,
    is_zero,
    numeric_value,
    require,
)

_REPLICA_REDUCTIONS: dict[str, Reduction] = {"Max": "max", "Min": "min", "All": "all", "Any": "any"}


def axes_of(value: Value, rank: int) -> set[int]:
    """Returns the axes in `value`, a tensor with known elements, as nonnegative numbers."""
    return {axis % rank for axis in value.integers} if rank else set()


def without_axes(label: Rows, axes: set[int], keeps: bool, power: int | None) -> Rows:
    """Returns the label of rows after a reduction of other axes."""
    return Rows(label.axis if keeps else label.axis - sum(axis < label.axis for axis in axes), label.size, power)


@rule("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")
def _(call: Call) -> Value:
    value, axes = call.inputs
    if value.dims is None or axes.numbers is None:
        is_sum = call.kind in ("Sum", "Mean") and isinstance(value.label, Partial)
        return Value(linear(value) if is_sum and axes.is_replicated else ALL_ROWS)
    keeps = call.attribute("keep_dims")
    reduced_axes = axes_of(axes, value.rank)
    dims = tuple(
        ONE if axis in reduced_axes else dim for axis, dim in enumerate(value.dims) if keeps or axis not in reduced_axes
    )
    if not reduced_axes and value.numbers is not None and call.kind != "EuclideanNorm":
        return value
    if call.kind == "Prod" and value.numbers is not None and value.numbers.ndim == 1 and reduced_axes and not keeps:
        return numeric_value(sizes.array([sizes.product(value.numbers)], ()), ())
    is_rounded = call.kind == "Mean" and call.operation.outputs[0].dtype.is_integer
    require(not is_rounded or not reduced_axes or value.is_replicated, "a quotient of integers is rounded")
    return Value(_reduce_label(call.kind, value, reduced_axes, keeps), dims)


def _reduce_label(kind: str, value: Value, axes: set[int], keeps: bool) -> Label:
    label = value.label
    if isinstance(label, Partial) and _REPLICA_REDUCTIONS.get(kind) == label.reduction:
        return label
    if not isinstance(label, Replicated | Rows):
        return linear(value) if kind in ("Sum", "Mean") else ALL_ROWS
    if isinstance(label, Replicated) or label.axis not in axes:
        if kind in ("Prod", "All", "Any"):
            if label.power:
                return ALL_ROWS
            label = dataclasses.replace(label, power=0)  # an empty product is 1
        return without_axes(label, axes, keeps, label.power) if isinstance(label, Rows) else label
    if kind in ("Sum", "Mean"):
        return Replicated(None) if label.power is None else Partial("sum", label.power - (kind == "Mean"))
    if kind in _REPLICA_REDUCTIONS and not label.power:
        return Partial(_REPLICA_REDUCTIONS[kind])
    return ALL_ROWS


@rule("L2Loss")
def _(call: Call) -> Value:
    (value,) = call.inputs
    squares = Value(product_of([value, value], (1, 1)), value.dims)
    return Value(_reduce_label("Sum", squares, set(range(value.rank)), keeps=False), ())


@rule("ArgMax", "ArgMin")
def _(call: Call) -> Value:
    value, axis = call.inputs
    axes = axes_of(axis, value.rank)
    dims = tuple(dim for number, dim in enumerate(value.known_dims) if number not in axes)
    if isinstance(value.label, Replicated):  # a positive factor keeps the order
        return Value(REPLICATED, dims)
    if isinstance(value.label, Rows) and value.label.axis not in axes:
        return Value(without_axes(value.label, axes, False, 0), dims)
    return Value(ALL_ROWS, dims)


def axis_label(value: Value, axes: set[int], *, keeps_power: bool) -> Label:
    """Returns the label of the result of a function along `axes` that keeps the shape."""
    label = value.label
    row_axis = label.axis if isinstance(label, Rows) else None
    if isinstance(label, Replicated | Rows) and row_axis not in axes and (keeps_power or not label.power):
        return label if keeps_power else dataclasses.replace(label, power=0)
    return linear(value) if keeps_power and isinstance(label, Partial) else ALL_ROWS


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp")
def _(call: Call) -> Value:
    value, axis = call.inputs
    return Value(axis_label(value, axes_of(axis, value.rank), keeps_power=call.kind == "Cumsum"), value.dims)


@rule("ReverseV2", "Roll")
def _(call: Call) -> Value:
    value, *distances, axes = call.inputs
    require(all(distance.is_replicated for distance in distances), "the distance depends on rows")
    return Value(axis_label(value, axes_of(axes, value.rank), keeps_power=True), value.dims)


@rule("ReverseSequence")
def _(call: Call) -> Value:
    value, lengths = call.inputs
    batch_axis, axis = call.attribute("batch_dim"), call.attribute("seq_dim")
    if isinstance(value.label, Rows) and value.label.axis == batch_axis and lengths.label == Rows(0, value.label.size):
        return Value(value.label, value.dims)
    label = axis_label(value, {axis, batch_axis}, keeps_power=True)
    return Value(label if lengths.is_replicated else ALL_ROWS, value.dims)


@rule("Softmax", "LogSoftmax")
def _(call: Call) -> Value:
    (value,) = call.inputs
    return Value(axis_label(value, {value.rank - 1}, keeps_power=False), value.dims)


@rule("TopKV2")
def _(call: Call) -> list[Value]:
    value, count = call.inputs
    require(count.is_replicated, "the number of values depends on rows")
    label, dims = value.label, (*value.known_dims[:-1], None)
    if not isinstance(label, Replicated | Rows) or isinstance(label, Rows) and label.axis == value.rank - 1:
        raise NoRuleError("values of several rows are sorted together")
    return [Value(label, dims), Value(dataclasses.replace(label, power=0), dims)]


@rule("InTopKV2", "InTopK")
def _(call: Call) -> Value:
    predictions, targets, *parameters = call.inputs
    label = pointwise([predictions])
    are_of_rows = isinstance(label, Rows) and not label.axis and pointwise([targets]) == label
    require(are_of_rows, "the predictions and the targets have different rows")
    require(all(parameter.is_replicated for parameter in parameters), "the number of classes depends on rows")
    return Value(label, targets.dims)


@rule("Bincount", "DenseBincount")
def _(call: Call) -> Value:
    """Counts, or sums of weights, for each bin; `DenseBincount` counts for each row of a matrix."""
    values, size, weights = call.inputs
    label, power = values.rows, 0
    require(size.is_replicated and not label.power, "the values are not rows")
    if weights.dims != (sizes.size(0),):
        require(weights.rows.axis == label.axis, "the values and the weights have different rows")
        power = weights.rows.power or 0
    if call.kind == "DenseBincount" and (values.rank > 1 or call.attribute("binary_output")):
        require(values.rank > 1 and not label.axis, "a value may occur in any row")
        return Value(Rows(0, label.size, power))
    return Value(Partial("sum", power))


_LETTERS = "abcdefgh"  # for the batch dims of matrices


def contraction(values: Sequence[Value], letters: Sequence[str], output: str) -> Label:
    """Returns the label of a sum of products of `values`.

    For each factor, `letters` has one letter per dim; `output` has the letters of the result. The other dims are summed.
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
    power = None if all(map(is_zero, labels)) else sum(label.power or 0 for label in labels)
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
    operands = list(zip(call.inputs, inputs.split(","), strict=True))
    counts = [value.rank - len(labels.replace("...", "")) for value, labels in operands]
    digits = "0123456789"[: max(counts)]  # the dims of an ellipsis
    names = [labels.replace("...", digits[len(digits) - n :]) for n, (_, labels) in zip(counts, operands, strict=True)]
    output = output.replace("...", digits)
    require(all(len(set(labels)) == len(labels) for labels in (*names, output)), "a letter is repeated in an equation")
    return Value(contraction(call.inputs, names, output), _dims(call.inputs, names, output))


@rule("Conv2DBackpropFilter", "DepthwiseConv2dNativeBackpropFilter", "Conv3DBackpropFilterV2")
def _(call: Call) -> Value:
    """The operation sums the products of an input and a gradient over rows and positions."""
    value, shape, gradient = call.inputs
    is_first = not any(isinstance(x.label, Rows) and x.label.axis for x in (value, gradient))
    require(is_first and shape.is_replicated, "the rows are not along the first axis")
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
    """The operation is a function of each matrix or vector."""
    value, *lengths = call.inputs
    inner, label = 1 if call.kind.endswith("FFT") else 2, value.rows
    require(not label.power and label.axis < value.rank - inner, "the matrix depends on several rows")
    require(all(length.is_replicated for length in lengths), "the length depends on rows")
    return Value(label)


@rule("MatrixSolve", "MatrixTriangularSolve")
def _(call: Call) -> Value:
    matrix, right = call.inputs
    label = right.rows
    require(matrix.rank == right.rank > label.axis + 2, "the matrix depends on several rows")
    is_of_rows = pointwise([matrix]) == Rows(label.axis, label.size)
    require(is_of_rows, "the matrices and the right-hand sides have different rows")
    return Value(label, right.dims)


@rule("BiasAdd")
def _(call: Call) -> Value:
    return Value(sum_of(call.inputs), call.inputs[0].dims)


def row_rule(
    *rows: int, linear: int | None = None, shape: int | None = None, inner: int = 1
) -> Callable[[Call], list[Value]]:
    """Returns the rule of an operation that processes each row of the first axis separately.

    Args:
      rows: positions of the inputs with rows; the others must be replicated.
      linear: position of an input in which the operation is linear; the result keeps the power of COUNT of this input.
      shape: position of an input that is a shape, which may contain the number of rows.
      inner: minimum number of axes of one row in the first input with rows.
    """

    def apply(call: Call) -> list[Value]:
        size = call.inputs[rows[0]].rows.size
        others = [value for number, value in enumerate(call.inputs) if number not in (*rows, shape)]
        are_rows = all(call.inputs[number].rows == Rows(0, size, call.inputs[number].label.power) for number in rows)
        require(are_rows, "an input does not have the rows along its first axis")
        require(all(value.is_replicated for value in others), "an input that should be replicated is not")
        is_scaled = any(call.inputs[number].label.power for number in rows if number != linear)
        require(not is_scaled, "an input is divided by the number of rows")
        require(call.inputs[rows[0]].rank > inner, "the rows of the batch are rows of one matrix")
        label = Rows(0, size, 0 if linear is None else call.inputs[linear].label.power)
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
    """The outputs are the losses of rows, and their gradients with respect to the logits."""
    logits, label = call.inputs[0], Rows(0, call.inputs[0].rows.size)
    are_rows = all(pointwise([value]) == label for value in call.inputs)
    require(are_rows, "labels and logits do not have the same rows along the first axis")
    return [Value(label, logits.known_dims[:1]), Value(label, logits.dims)]


# Random numbers: replicas draw different numbers for their rows, and equal numbers, from a common seed, for other tensors.


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
    are_replicated = all(value.is_replicated for value in parameters)
    require(are_replicated, "the seed or the bounds of random numbers depend on rows")
    if shape.numbers is not None:
        return broadcast(Value(REPLICATED, ()), tuple(shape.numbers))
    require(shape.is_replicated, "the shape of random numbers is unknown")
    return Value(REPLICATED)


@rule("StatelessMultinomial", "Multinomial")
def _(call: Call) -> Value:
    logits, *parameters = call.inputs
    label, are_replicated = pointwise([logits]), all(value.is_replicated for value in parameters)
    require(are_replicated, "the seed or the number of samples depends on rows")
    require(not isinstance(label, Rows) or not label.axis, "the distribution depends on several rows")
    return Value(label, (logits.known_dims[0], None))


@rule("RandomShuffle")
def _(call: Call) -> Value:
    require(call.is_replicated, "rows are shuffled")
    return Value(REPLICATED, call.inputs[0].dims)
