"""Reductions, and operations along an axis."""

import dataclasses

from tfdist.row_semantics import sizes
from tfdist.row_semantics.rules.elementwise import linear, pointwise, product_of
from tfdist.row_semantics.rules.registry import Call, rule
from tfdist.row_semantics.sizes import ONE
from tfdist.row_semantics.values import (
    ALL_ROWS,
    REPLICATED,
    Dims,
    Label,
    NoRuleError,
    Partial,
    Reduction,
    Replicated,
    Rows,
    Value,
    numeric_value,
)

_REPLICA_REDUCTIONS: dict[str, Reduction] = {"Max": "max", "Min": "min", "All": "all", "Any": "any"}


def axes_of(value: Value, rank: int) -> set[int]:
    """Returns the nonnegative axes in a known tensor."""
    return {axis % rank for axis in value.integers} if rank else set()


def without_axes(label: Rows, axes: set[int], keeps: bool, power: int | None) -> Rows:
    """Returns the label of rows after a reduction of other axes."""
    return Rows(label.axis if keeps else label.axis - sum(axis < label.axis for axis in axes), label.size, power)


@rule("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")
def _(call: Call) -> Value:
    value, axes = call.inputs
    if value.dims is None or axes.numbers is None:
        return Value(_label_for_unknown_axes(call))
    keeps = call.attribute("keep_dims")
    reduced_axes = axes_of(axes, value.rank)
    dims = tuple(
        ONE if axis in reduced_axes else dim for axis, dim in enumerate(value.dims) if keeps or axis not in reduced_axes
    )
    if not reduced_axes and value.numbers is not None and call.kind != "EuclideanNorm":
        return value
    if call.kind == "Prod" and value.numbers is not None and value.numbers.ndim == 1 and reduced_axes and not keeps:
        return numeric_value(sizes.array([sizes.product(value.numbers)], ()), ())
    if call.kind == "Mean" and reduced_axes and call.operation.outputs[0].dtype.is_integer and not value.is_replicated:
        raise NoRuleError("a quotient of integers is rounded")
    return Value(_reduce_label(call.kind, value, reduced_axes, keeps), dims)


def _label_for_unknown_axes(call: Call) -> Label:
    value, axes = call.inputs
    if not axes.is_replicated:
        return ALL_ROWS
    if value.is_replicated:
        return REPLICATED
    return linear(value) if call.kind in ("Sum", "Mean") and isinstance(value.label, Partial) else ALL_ROWS


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
    """Returns the label of a function along axes that keeps the shape."""
    label = value.label
    if value.is_replicated:
        return REPLICATED
    if isinstance(label, Replicated):
        return label if keeps_power else ALL_ROWS
    if isinstance(label, Rows) and label.axis not in axes and (keeps_power or not label.power):
        return label if keeps_power else Rows(label.axis, label.size, 0)
    return linear(value) if keeps_power and isinstance(label, Partial) else ALL_ROWS


@rule("Cumsum", "Cumprod", "CumulativeLogsumexp")
def _(call: Call) -> Value:
    value, axis = call.inputs
    return Value(axis_label(value, axes_of(axis, value.rank), keeps_power=call.kind == "Cumsum"), value.dims)


@rule("ReverseV2", "Roll")
def _(call: Call) -> Value:
    value, *distances, axes = call.inputs
    if not all(distance.is_replicated for distance in distances):
        raise NoRuleError("the distance depends on rows")
    return Value(axis_label(value, axes_of(axes, value.rank), keeps_power=True), value.dims)


@rule("ReverseSequence")
def _(call: Call) -> Value:
    value, lengths = call.inputs
    batch_axis, axis = call.attribute("batch_dim"), call.attribute("seq_dim")
    if isinstance(value.label, Rows) and value.label.axis == batch_axis and lengths.label == Rows(0, value.label.size):
        return Value(value.label, value.dims)
    return Value(
        axis_label(value, {axis, batch_axis}, keeps_power=True) if lengths.is_replicated else ALL_ROWS, value.dims
    )


@rule("Softmax", "LogSoftmax")
def _(call: Call) -> Value:
    (value,) = call.inputs
    return Value(axis_label(value, {value.rank - 1}, keeps_power=False), value.dims)


@rule("TopKV2")
def _(call: Call) -> list[Value]:
    value, count = call.inputs
    if not count.is_replicated:
        raise NoRuleError("the number of values depends on rows")
    label = value.label
    if not isinstance(label, Replicated | Rows) or isinstance(label, Rows) and label.axis == value.rank - 1:
        raise NoRuleError("values of several rows are ordered")
    dims: Dims = (*value.known_dims[:-1], None)
    return [Value(label, dims), Value(dataclasses.replace(label, power=0), dims)]


@rule("InTopKV2", "InTopK")
def _(call: Call) -> Value:
    predictions, targets, *parameters = call.inputs
    label = pointwise([predictions])
    if not isinstance(label, Rows) or label.axis or pointwise([targets]) != label:
        raise NoRuleError("the predictions and the classes are not those of the same rows")
    if not all(parameter.is_replicated for parameter in parameters):
        raise NoRuleError("the number of classes depends on rows")
    return Value(label, targets.dims)


@rule("Bincount", "DenseBincount")
def _(call: Call) -> Value:
    """Counts, or sums of weights, for each bin; `DenseBincount` counts for each row of a matrix."""
    values, size, weights = call.inputs
    label, weight_label = values.label, weights.label
    if not size.is_replicated or not isinstance(label, Rows) or label.power:
        raise NoRuleError("the values are not rows")
    power = 0
    if weights.dims != (sizes.size(0),):
        if not isinstance(weight_label, Rows) or weight_label.axis != label.axis:
            raise NoRuleError("the values and the weights have different rows")
        power = weight_label.power or 0
    if call.kind == "DenseBincount" and (values.rank > 1 or call.attribute("binary_output")):
        if values.rank == 1 or label.axis:
            raise NoRuleError("a value may occur in any row")
        return Value(Rows(0, label.size, power))
    return Value(Partial("sum", power))
