"""Reductions, and what runs along an axis."""

from tfdist.row_semantics import sizes
from tfdist.row_semantics.labels import (
    ALL_ROWS,
    REPLICATED,
    Label,
    Partial,
    Reduction,
    Replicated,
    Rows,
    is_zero,
)
from tfdist.row_semantics.rules.elementwise import linear
from tfdist.row_semantics.rules.registry import Call, rule
from tfdist.row_semantics.sizes import ONE
from tfdist.row_semantics.values import Dims, NoRuleError, Value, of_numbers

_OVER_REPLICAS: dict[str, Reduction] = {"Max": "max", "Min": "min", "All": "all", "Any": "any"}


def axes_of(value: Value, rank: int) -> set[int]:
    """Returns the axes that a known tensor names."""
    return {axis % rank for axis in value.integers} if rank else set()


def without_axes(label: Rows, axes: set[int], keeps: bool, power: int | None) -> Rows:
    """Returns the label of rows of which other axes are reduced."""
    return Rows(label.axis if keeps else label.axis - sum(axis < label.axis for axis in axes), label.size, power)


@rule("Sum", "Mean", "Max", "Min", "Prod", "All", "Any", "EuclideanNorm")
def _(call: Call) -> Value:
    value, axes = call.inputs
    if value.dims is None or axes.numbers is None:
        return Value(_of_unknown_axes(call))
    keeps = call.attribute("keep_dims")
    reduced = axes_of(axes, value.rank)
    dims = tuple(ONE if axis in reduced else dim for axis, dim in enumerate(value.dims) if keeps or axis not in reduced)
    if not reduced and value.numbers is not None:
        return value
    if call.kind == "Prod" and value.numbers is not None and value.numbers.ndim == 1 and reduced and not keeps:
        return of_numbers(sizes.array([sizes.product(value.numbers)], ()), ())
    return Value(_reduced(call.kind, value, reduced, keeps), dims)


def _of_unknown_axes(call: Call) -> Label:
    value, axes = call.inputs
    if not axes.is_replicated:
        return ALL_ROWS
    if value.is_replicated:
        return REPLICATED
    return linear(value) if call.kind in ("Sum", "Mean") and isinstance(value.label, Partial) else ALL_ROWS


def _reduced(kind: str, value: Value, axes: set[int], keeps: bool) -> Label:
    label = value.label
    if isinstance(label, Replicated):
        keeps_power = not label.power or kind in ("Sum", "Mean", "Max", "Min", "EuclideanNorm")
        return (label if kind != "All" else REPLICATED) if keeps_power else ALL_ROWS
    if not isinstance(label, Rows):
        return linear(value) if kind in ("Sum", "Mean") else ALL_ROWS
    if label.axis not in axes:
        keeps_power = not label.power or kind in ("Sum", "Mean", "Max", "Min", "EuclideanNorm")
        return without_axes(label, axes, keeps, label.power) if keeps_power else ALL_ROWS
    if kind in ("Sum", "Mean"):
        return Replicated(None) if label.power is None else Partial("sum", label.power - (kind == "Mean"))
    if kind in _OVER_REPLICAS and not label.power:
        return Partial(_OVER_REPLICAS[kind])
    return ALL_ROWS


@rule("L2Loss")
def _(call: Call) -> Value:
    (value,) = call.inputs
    label: Label = ALL_ROWS
    if isinstance(value.label, Replicated):
        label = Replicated(None if value.label.power is None else 2 * value.label.power)
    elif isinstance(value.label, Rows):
        label = Replicated(None) if value.label.power is None else Partial("sum", 2 * value.label.power)
    return Value(label, ())


@rule("ArgMax", "ArgMin")
def _(call: Call) -> Value:
    value, axis = call.inputs
    axes = axes_of(axis, value.rank)
    dims = tuple(dim for number, dim in enumerate(value.known_dims) if number not in axes)
    if isinstance(value.label, Replicated):  # a positive factor changes no order
        return Value(REPLICATED, dims)
    if isinstance(value.label, Rows) and value.label.axis not in axes:
        return Value(without_axes(value.label, axes, False, 0), dims)
    return Value(ALL_ROWS, dims)


def along(value: Value, axes: set[int], *, keeps_power: bool) -> Label:
    """Returns the label of a function along some axes, which keeps the shape."""
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
    return Value(along(value, axes_of(axis, value.rank), keeps_power=call.kind == "Cumsum"), value.dims)


@rule("ReverseV2")
def _(call: Call) -> Value:
    value, axes = call.inputs
    return Value(along(value, axes_of(axes, value.rank), keeps_power=True), value.dims)


@rule("ReverseSequence")
def _(call: Call) -> Value:
    value, lengths = call.inputs
    batch_axis, axis = call.attribute("batch_dim"), call.attribute("seq_dim")
    is_along = isinstance(value.label, Rows) and value.label.axis == batch_axis
    if (
        is_along
        and isinstance(lengths.label, Rows)
        and not lengths.label.power
        and lengths.label.size == value.label.size
    ):  # type: ignore[union-attr]
        return Value(value.label, value.dims)
    return Value(along(value, {axis, batch_axis}, keeps_power=True) if lengths.is_replicated else ALL_ROWS, value.dims)


@rule("Softmax", "LogSoftmax")
def _(call: Call) -> Value:
    (value,) = call.inputs
    return Value(along(value, {value.rank - 1}, keeps_power=False), value.dims)


@rule("TopKV2", "TopK")
def _(call: Call) -> list[Value]:
    value, count = call.inputs[0], call.inputs[1] if call.kind == "TopKV2" else None
    if count is not None and not count.is_replicated:
        raise NoRuleError("the number of values depends on rows")
    indices = along(value, {value.rank - 1}, keeps_power=True)
    if isinstance(indices, Rows | Replicated):
        indices = type(indices)(*_without_power(indices))
    dims: Dims = (
        *value.known_dims[:-1],
        count.numbers.item() if count is not None and count.numbers is not None else None,
    )
    values = along(value, {value.rank - 1}, keeps_power=True)
    if isinstance(values, Partial):
        return [Value(ALL_ROWS, dims), Value(ALL_ROWS, dims)]
    return [Value(values, dims), Value(indices, dims)]


def _without_power(label: Rows | Replicated) -> tuple:  # type: ignore[type-arg]
    return (label.axis, label.size, 0) if isinstance(label, Rows) else (0,)


@rule("InTopKV2", "InTopK")
def _(call: Call) -> Value:
    predictions, targets = call.inputs[:2]
    if all(
        isinstance(each.label, Rows) and each.label.axis == 0 and not each.label.power
        for each in (predictions, targets)
    ):
        return Value(Rows(0, predictions.label.size), predictions.known_dims[:1])  # type: ignore[union-attr]
    return Value(
        REPLICATED if all(each.is_replicated for each in call.inputs) else ALL_ROWS,
        predictions.dims and predictions.dims[:1],
    )


@rule("Bincount", "DenseBincount")
def _(call: Call) -> Value:
    values, size, weights = call.inputs
    is_dense = call.kind == "DenseBincount"
    if all(each.is_replicated for each in call.inputs):
        return Value(REPLICATED)
    if not size.is_replicated or not isinstance(values.label, Rows) or values.label.power:
        raise NoRuleError("the number of bins depends on rows")
    if is_dense and values.rank == 2:
        return Value(
            Rows(0, values.label.size)
            if values.label.axis == 0 and not call.attribute("binary_output") and _weighs(values, weights)
            else ALL_ROWS
        )
    if is_dense and call.attribute("binary_output"):
        return Value(ALL_ROWS)
    return Value(Partial("sum", _power_of_weights(weights)) if _weighs(values, weights) else ALL_ROWS)


def _weighs(values: Value, weights: Value) -> bool:
    """Returns whether weights are none, or one for each value."""
    is_none = weights.numbers is not None and weights.numbers.size == 0 or weights.dims == (sizes.size(0),)
    return is_none or (
        isinstance(weights.label, Rows) and weights.label.axis == values.label.axis and not is_zero(weights.label)
    )  # type: ignore[union-attr]


def _power_of_weights(weights: Value) -> int:
    return weights.label.power or 0 if isinstance(weights.label, Rows) else 0
