"""Products of matrices and other contractions, by the letters of Einstein's summation."""

from collections.abc import Sequence

from tfdist.row_semantics.labels import ALL_ROWS, ZEROS, Label, Partial, Replicated, Rows, is_zero, power_of
from tfdist.row_semantics.rules.elementwise import pointwise, product_of
from tfdist.row_semantics.rules.registry import Call, rule
from tfdist.row_semantics.sizes import ONE, Size
from tfdist.row_semantics.values import Dims, NoRuleError, Value, broadcast_dim

_LETTERS = "abcdefgh"  # of dims before those of the matrices


def contraction(values: Sequence[Value], letters: Sequence[str], output: str) -> Label:
    """Returns the label of a sum of products.

    Args:
      values: the factors.
      letters: for each factor, a letter for each of its dims.
      output: the letters of the result; the others are summed over.
    """
    labels = [value.label for value in values]
    rows = [(label, names[label.axis]) for label, names in zip(labels, letters, strict=True) if isinstance(label, Rows)]
    if not rows:
        partial_first = sorted(values, key=lambda value: not isinstance(value.label, Partial))
        return product_of(partial_first, [1] * len(values))
    if any(not isinstance(label, Replicated | Rows) for label in labels):
        return ALL_ROWS
    (first, name), *_ = rows
    if len({other for _, other in rows}) > 1 or len({label.size for label, _ in rows}) > 1:
        return ALL_ROWS
    for value, names in zip(values, letters, strict=True):
        if isinstance(value.label, Replicated) and name in names and value.known_dims[names.index(name)] != ONE:
            return ALL_ROWS
    power = None if all(map(is_zero, labels)) else sum(map(power_of, labels))
    if name in output:
        return Rows(output.index(name), first.size, power)
    return ZEROS if power is None else Partial("sum", power)


def _dims(values: Sequence[Value], letters: Sequence[str], output: str) -> Dims:
    """Returns the dims of the result: dims of size 1 are broadcast."""
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
        value.rank - len(each.replace("...", "")) for value, each in zip(call.inputs, inputs.split(","), strict=True)
    ]
    others = "0123456789"[: max(counts)]  # the dims of an ellipsis
    names = [each.replace("...", others[len(others) - n :]) for n, each in zip(counts, inputs.split(","), strict=True)]
    output = output.replace("...", others)
    if any(len(set(each)) < len(each) for each in (*names, output)):
        raise NoRuleError("a repeated letter in an equation")
    return Value(contraction(call.inputs, names, output), _dims(call.inputs, names, output))


@rule("Conv2DBackpropFilter", "DepthwiseConv2dNativeBackpropFilter", "Conv3DBackpropFilterV2")
def _(call: Call) -> Value:
    """Sums over the rows and the positions of the products of an input and a gradient."""
    value, shape, gradient = call.inputs
    if any(isinstance(each.label, Rows) and each.label.axis for each in (value, gradient)) or not shape.is_replicated:
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
    if not all(each.is_replicated for each in lengths):
        raise NoRuleError("the length depends on rows")
    return Value(value.label)


@rule("MatrixSolve", "MatrixTriangularSolve")
def _(call: Call) -> Value:
    matrix, right = call.inputs
    label = right.label
    if not isinstance(label, Rows) or matrix.rank != right.rank or label.axis >= right.rank - 2:
        raise NoRuleError("the matrix depends on several rows")
    if pointwise([matrix]) != Rows(label.axis, label.size):
        raise NoRuleError("the matrices do not belong to the rows")
    return Value(label, right.dims)
