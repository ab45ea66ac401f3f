"""Rules for elementwise operations with broadcasting."""

import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import tensorflow as tf

from tfdist.row_semantics import sizes
from tfdist.row_semantics.rules.registry import RULES, Call, rule
from tfdist.row_semantics.sizes import Size
from tfdist.row_semantics.values import (
    ALL_ROWS,
    REPLICATED,
    UNWRITTEN,
    AllRows,
    Label,
    Partial,
    Replicated,
    ReplicatedPlusSum,
    Rows,
    Value,
    axis_of_rows,
    broadcast_dims,
    broadcast_sizes,
    common_power,
    is_zero,
    join,
    join_values,
    numeric_value,
    require,
    total,
    without_base,
)

_Arithmetic = Callable[[Size, Size], Size | None]


def _compute_numbers(call: Call, arithmetic: _Arithmetic) -> Value | None:
    """Returns the value of a result that is computed from known elements; None if elements are unknown."""
    arrays = [value.numbers for value in call.inputs]
    if len(arrays) != 2 or any(array is None for array in arrays):
        return None
    left, right = np.broadcast_arrays(*arrays)  # type: ignore[arg-type]
    pairs = zip(left.flat, right.flat, strict=True)
    results = [None if a is None or b is None else arithmetic(a, b) for a, b in pairs]
    if all(result is None for result in results):
        return None
    return numeric_value(sizes.array(results, left.shape), broadcast_dims(call.inputs))


def rows_label(values: Sequence[Value], power: int | None) -> Label:
    """Returns the label of broadcast rows."""
    dims, axis = broadcast_dims(values), axis_of_rows(values)
    if axis is None or dims is None:
        return ALL_ROWS
    return Rows(len(dims) + axis[0], axis[1], power)


def choice(values: Sequence[Value], candidates: Sequence[Value]) -> Label:
    """Returns the label of a selection from `candidates` or their sum; `values` are all values that are broadcast."""
    if not any(isinstance(value.label, Rows) for value in values):
        return join([value.label for value in candidates])
    if not all(isinstance(value.label, Rows | Replicated) for value in candidates):
        return ALL_ROWS
    agrees, power = common_power(value.label.power for value in candidates)
    return rows_label(values, power) if agrees else ALL_ROWS


def sum_of(values: Sequence[Value]) -> Label:
    """Returns the label of a broadcast sum."""
    if any(isinstance(value.label, Rows) for value in values):
        return choice(values, values)
    return total([value.label for value in values])


def product_of(values: Sequence[Value], signs: Sequence[int]) -> Label:
    """Returns the label of a broadcast product; `signs` has 1 for a factor and -1 for a divisor."""
    labels = [value.label for value in values]
    total_power = sum(sign * (label.power or 0) for label, sign in zip(labels, signs, strict=True))
    first, *factors = labels
    if isinstance(first, Partial) and all(isinstance(factor, Replicated) for factor in factors):
        divides_by_zero = any(is_zero(label) and sign < 0 for label, sign in zip(labels, signs, strict=True))
        return ALL_ROWS if first.reduction != "sum" or divides_by_zero else Partial("sum", total_power)
    if any(not isinstance(label, Replicated | Rows) for label in labels):
        return ALL_ROWS
    is_zero_product = all(map(is_zero, labels)) and min(signs) > 0  # zero times infinity is not zero
    power = None if is_zero_product else total_power
    return rows_label(values, power) if any(isinstance(label, Rows) for label in labels) else Replicated(power)


@rule("AddV2", "Add", "Sub")
def _(call: Call) -> Value:
    is_difference = call.kind == "Sub"
    numbers = _compute_numbers(call, (lambda a, b: a + -b) if is_difference else (lambda a, b: a + b))
    return numbers or Value(add_or_subtract(*call.inputs, is_difference=is_difference), broadcast_dims(call.inputs))


def add_or_subtract(left: Value, right: Value, *, is_difference: bool) -> Label:
    """Returns the label of a sum or a difference, with the variable to which a sum is added, if any."""
    label = sum_of([left, right])
    if not isinstance(label, ReplicatedPlusSum):
        return label
    bases = [
        value for value in (left, right) if isinstance(value.label, ReplicatedPlusSum) or value.label == REPLICATED
    ]
    if len(bases) > 1 or (is_difference and bases[0] is right):
        return label
    return dataclasses.replace(label, variable=bases[0].base)


@rule("AddN", "AccumulateNV2")
def _(call: Call) -> Value:
    if call.operation.outputs[0].dtype == tf.variant:
        if any(value.element is None for value in call.inputs):
            return Value(ALL_ROWS)
        return Value(REPLICATED, join_values(call.inputs).dims, element=_sum_of_elements(call.inputs))
    return Value(sum_of(call.inputs), broadcast_dims(call.inputs))


def _sum_of_elements(lists: Sequence[Value]) -> Value:
    """Returns the abstract value of the elements of a sum of lists."""
    elements = [value.element or Value(ALL_ROWS) for value in lists if value.element != UNWRITTEN] or [UNWRITTEN]
    if len(elements) == 1:
        return elements[0]
    return Value(sum_of(elements), broadcast_dims(elements))


@rule("Mul", "MulNoNan")
def _(call: Call) -> Value:
    values = sorted(call.inputs, key=lambda value: not isinstance(value.label, Partial))
    numbers = _compute_numbers(call, lambda a, b: a * b)
    return numbers or Value(product_of(values, (1, 1)), broadcast_dims(call.inputs))


@rule("RealDiv", "DivNoNan", "Div")
def _(call: Call) -> Value:
    require(call.kind != "Div" or not call.operation.inputs[0].dtype.is_integer, "integer division rounds")
    numbers = _compute_numbers(call, lambda a, b: a.divided_by(b))
    return numbers or Value(product_of(call.inputs, (1, -1)), broadcast_dims(call.inputs))


@rule("Square")
def _(call: Call) -> Value:
    (value,) = call.inputs
    if value.numbers is not None:
        squares = [number and number * number for number in value.numbers.flat]
        return numeric_value(sizes.array(squares, value.numbers.shape))
    return Value(product_of([value, value], (1, 1)), value.dims)


def linear(value: Value) -> Label:
    """Returns the label of a linear function of each element."""
    label = without_base(value.label)
    return label if not isinstance(label, Partial) or label.reduction == "sum" else ALL_ROWS


@rule("Neg")
def _(call: Call) -> Value:
    (value,) = call.inputs
    if value.numbers is None:
        return Value(linear(value), value.dims)
    negated = [number and -number for number in value.numbers.flat]
    return Value(linear(value), value.dims, sizes.array(negated, value.numbers.shape))


@rule(
    *("Identity", "StopGradient", "PreventGradient", "Snapshot", "EnsureShape", "PlaceholderWithDefault"),
    *("CheckNumerics", "CheckNumericsV2"),
)
def _(call: Call) -> Value:
    return call.inputs[0]


@rule("IdentityN")
def _(call: Call) -> Sequence[Value]:
    return call.inputs


@rule("Cast")
def _(call: Call) -> Value:
    (value,) = call.inputs
    source, target = call.operation.inputs[0].dtype, call.operation.outputs[0].dtype
    is_narrow = target.is_integer and target.size < 4  # values wrap modulo 2^8 or 2^16
    becomes_integer = target.is_integer and not source.is_bool and (not source.is_integer or is_narrow)
    if value.numbers is not None and not target.is_bool and not is_narrow:
        if not becomes_integer or all(number is not None and number.is_integer for number in value.numbers.flat):
            return dataclasses.replace(value, variable=None)
    if target.is_bool or target.is_complex != source.is_complex:
        return Value(pointwise(call.inputs), value.dims)
    if becomes_integer and not (value.is_replicated or is_zero(value.label)):
        is_rows = isinstance(value.label, Rows) and value.label.power == 0
        return Value(value.label if is_rows else ALL_ROWS, value.dims)
    return Value(linear(value), value.dims)


def pointwise(values: Sequence[Value]) -> Label:
    """Returns the label of the result of an arbitrary elementwise function."""
    if all(value.is_replicated for value in values):
        return REPLICATED
    if any(not isinstance(value.label, Replicated | Rows) or value.label.power for value in values):
        return ALL_ROWS
    return rows_label(values, 0)


def pointwise_rule(call: Call) -> Value:
    """The rule of an arbitrary elementwise function."""
    return Value(pointwise(call.inputs), broadcast_dims(call.inputs))


_POINTWISE = """
    Acos Acosh Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e Ceil Cos Cosh Digamma Elu Erf Erfc Erfinv Exp Expm1 Floor
    Igamma Igammac IgammaGradA Inv IsFinite IsInf IsNan Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Ndtri NextAfter
    Polygamma Pow Reciprocal Relu6 Rint Round Rsqrt Selu Sigmoid Sin Sinh Softplus Softsign Sqrt SquaredDifference Tan
    Tanh TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta ClipByValue Betainc Bitcast BitwiseAnd BitwiseOr BitwiseXor Invert
    LeftShift RightShift ApproximateEqual Mod
    Bucketize Complex Real Imag Angle Conj StringToHashBucketFast StringToHashBucketStrong AsString StringLength StringLower
"""
for _type in _POINTWISE.split():
    RULES[_type] = pointwise_rule


def _register_numeric_rule(kind: str, arithmetic: _Arithmetic, default: Callable[[Call], Value]) -> None:
    def apply(call: Call) -> Value:
        return _compute_numbers(call, arithmetic) or default(call)

    RULES[kind] = apply


def _floor_divide(a: Size, b: Size) -> Size | None:
    if not (a.is_integer and b.is_integer):
        return None  # 0.3 // 0.1
    quotient = a.divided_by(b)
    if quotient is None or quotient.is_integer or not quotient.coefficient:
        return quotient
    return Size(Fraction(a.coefficient // b.coefficient)) if a.is_known and b.is_known else None


def _remainder(a: Size, b: Size) -> Size | None:
    if not (a.is_integer and b.is_integer):
        return None
    if a.is_known and b.is_known and b.coefficient:
        return Size(a.coefficient % b.coefficient)
    quotient = a.divided_by(b)
    return Size(Fraction(0)) if quotient is not None and quotient.is_integer else None


def _maximum_if_ordered(a: Size, b: Size) -> Size | None:
    ratio = a.divided_by(b) if b.coefficient > 0 else None
    if a.is_known and b.is_known:
        return max(a, b, key=lambda size: size.coefficient)
    if b.is_known and a.is_positive and a.is_integer and a.coefficient >= b.coefficient:
        return a
    return a if ratio is not None and ratio.is_positive and ratio.is_integer else None


def _maximum(a: Size, b: Size) -> Size | None:
    return _maximum_if_ordered(a, b) or _maximum_if_ordered(b, a)


def _minimum(a: Size, b: Size) -> Size | None:
    larger = _maximum(a, b)
    return None if larger is None else b if larger == a else a


_register_numeric_rule("FloorDiv", _floor_divide, pointwise_rule)
_register_numeric_rule("FloorMod", _remainder, pointwise_rule)


def _homogeneous_rule(call: Call) -> Value:
    """The rule of a function f with f(c x) = c f(x) for c > 0, which keeps the common power of its inputs."""
    labels, dims = [value.label for value in call.inputs], broadcast_dims(call.inputs)
    agrees, power = common_power(label.power for label in labels)
    if not agrees or any(not isinstance(label, Replicated | Rows) for label in labels):
        return Value(ALL_ROWS, dims)
    has_rows = any(isinstance(label, Rows) for label in labels)
    return Value(rows_label(call.inputs, power) if has_rows else Replicated(power), dims)


for _type in ("Relu", "Abs", "LeakyRelu"):
    RULES[_type] = _homogeneous_rule
_register_numeric_rule("Maximum", _maximum, _homogeneous_rule)
_register_numeric_rule("Minimum", _minimum, _homogeneous_rule)


@rule("Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual")
def _(call: Call) -> Value:
    compared = _homogeneous_rule(call)
    if call.kind.endswith("Equal") and call.kind[0] in "EN" and not call.attribute("incompatible_shape_error"):
        # The result for tensors that cannot be broadcast is one boolean.
        sizes_by_axis = broadcast_sizes(call.inputs)
        require(all(len(dims) < 2 and None not in dims for dims in sizes_by_axis), "the shapes cannot be compared")
    if isinstance(compared.label, Rows | Replicated):
        return Value(dataclasses.replace(compared.label, power=0), compared.dims)
    return compared


@rule("Sign")
def _(call: Call) -> Value:
    (value,) = call.inputs
    if not isinstance(value.label, Replicated | Rows):
        return Value(ALL_ROWS, value.dims)
    return Value(dataclasses.replace(value.label, power=value.label.power and 0), value.dims)  # zeros stay zeros


# Positions of the inputs in which these gradients are linear.
_LINEAR_INPUTS = {
    **dict.fromkeys("ReluGrad Relu6Grad LeakyReluGrad EluGrad SeluGrad SoftplusGrad SoftsignGrad".split(), 0),
    **dict.fromkeys("SigmoidGrad TanhGrad RsqrtGrad SqrtGrad ReciprocalGrad InvGrad".split(), 1),
}


def _linear_gradient(call: Call) -> Value:
    position = _LINEAR_INPUTS[call.kind]
    gradient, other = call.inputs[position], call.inputs[1 - position]
    is_root_of_sum = call.kind == "SqrtGrad" and isinstance(gradient.label, Partial)
    require(not is_root_of_sum, "at 0, the gradient of a square root is finite only if the whole sum is 0")
    factor = Value(pointwise([other]), other.dims)
    values = [gradient, factor] if isinstance(gradient.label, Partial) else [factor, gradient]
    return Value(product_of(values, (1, 1)), broadcast_dims(call.inputs))


for _type in _LINEAR_INPUTS:
    RULES[_type] = _linear_gradient


@rule("SelectV2", "Select")
def _(call: Call) -> Value:
    condition, *candidates = call.inputs
    if call.kind == "Select" and condition.rank < candidates[0].rank:
        # A vector condition selects along the first axis.
        ones = [sizes.ONE] * (candidates[0].rank - condition.rank)
        condition = dataclasses.replace(condition, dims=(*condition.known_dims, *ones))
    dims = broadcast_dims([condition, *candidates])
    is_given = condition.is_replicated or (isinstance(condition.label, Rows) and not condition.label.power)
    label = choice([condition, *candidates], candidates) if is_given else ALL_ROWS
    return Value(label, dims)


@rule("ZerosLike", "OnesLike")
def _(call: Call) -> Value:
    return _constant_like(call.inputs[0], None if call.kind == "ZerosLike" else 0)


def _constant_like(value: Value, power: int | None) -> Value:
    """Returns a constant with the shape of a value."""
    if value.element is not None:
        return Value(REPLICATED, value.dims, element=_constant_like(value.element, power))
    if isinstance(value.label, Rows):
        return Value(dataclasses.replace(value.label, power=power), value.dims)
    if isinstance(value.label, AllRows) and value.numbers is None:
        return Value(ALL_ROWS, value.dims)
    return Value(Replicated(power), value.dims)


@rule("NoOp", "Assert", "PrintV2", "ControlTrigger", "WriteScalarSummary", "WriteSummary", "VarIsInitializedOp")
def _(call: Call) -> list[Value]:
    return [Value(REPLICATED) for _ in call.operation.outputs]
