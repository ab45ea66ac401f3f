"""Slices, gathering and scattering."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from tfdist.row_semantics import sizes
from tfdist.row_semantics.labels import ALL_ROWS, REPLICATED, Label, Partial, Replicated, Rows, is_zero, total
from tfdist.row_semantics.rules.elementwise import linear, rows_label
from tfdist.row_semantics.rules.registry import Call, rule
from tfdist.row_semantics.rules.shapes import moved
from tfdist.row_semantics.sizes import ONE, Size
from tfdist.row_semantics.values import Dims, NoRuleError, Value, of_numbers


class _Axis(NamedTuple):
    """What a slice does with one axis: takes all of it ("all") or a part, adds ("new") or removes ("index") one."""

    action: str
    source: int
    target: int


def _slices(call: Call, dims: Dims, begin: Value, end: Value, strides: Value) -> list[_Axis]:
    """Returns the axes of a strided slice, where `dims` are those of the tensor that is sliced."""
    masks = {name: call.attribute(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    steps = strides.integers
    count = len(steps)
    kept = sum(not (masks["new_axis"] | masks["ellipsis"]) >> number & 1 for number in range(count))
    axes: list[_Axis] = []
    source = target = 0

    def add(action: str) -> None:
        nonlocal source, target
        axes.append(_Axis(action, source, target))
        source += action != "new"
        target += action != "index"

    for number in range(count):
        if masks["ellipsis"] >> number & 1:
            for _ in range(len(dims) - kept):
                add("all")
        elif masks["new_axis"] >> number & 1:
            add("new")
        elif masks["shrink_axis"] >> number & 1:
            add("index")
        else:
            add("all" if _is_all(masks, number, steps[number], begin, end, dims[source]) else "part")
    while source < len(dims):
        add("all")
    return axes


def _is_all(masks: dict[str, int], number: int, step: int, begin: Value, end: Value, dim: Size | None) -> bool:
    """Returns whether a slice takes a whole axis."""
    starts = masks["begin"] >> number & 1 or (begin.numbers is not None and _is_zero(begin.numbers.flat[number]))
    ends = masks["end"] >> number & 1 or (
        end.numbers is not None and dim is not None and end.numbers.flat[number] == dim
    )
    return step == 1 and bool(starts) and bool(ends)


def _is_zero(number: Size | None) -> bool:
    return number is not None and not number.coefficient


def _sliced_dims(axes: Sequence[_Axis], dims: Dims) -> Dims:
    return tuple(
        ONE if axis.action == "new" else dims[axis.source] if axis.action == "all" else None
        for axis in axes
        if axis.action != "index"
    )


@rule("StridedSlice")
def _(call: Call) -> Value:
    value, begin, end, strides = call.inputs
    if value.numbers is not None and value.numbers.ndim == 1 and (known := _sliced_numbers(call)) is not None:
        return known
    if value.is_replicated and value.dims is None:
        return Value(REPLICATED if all(each.is_replicated for each in (begin, end, strides)) else ALL_ROWS)
    axes = _slices(call, value.known_dims, begin, end, strides)
    takes_parts = any(axis.action in ("part", "index") for axis in axes)
    if takes_parts and not _bounds_are_replicated(call, begin, end):
        raise NoRuleError("the bounds of a slice depend on rows")
    dims = _sliced_dims(axes, value.known_dims)
    if not isinstance(value.label, Rows):
        return moved(value, 0, dims)
    (own,) = [axis for axis in axes if axis.source == value.label.axis and axis.action != "new"]
    if own.action != "all":
        raise NoRuleError("some rows are selected")
    return moved(value, own.target, dims)


def _bounds_are_replicated(call: Call, begin: Value, end: Value) -> bool:
    """Returns whether the bounds that a slice uses do not depend on rows: those of the axis of the rows, which is whole, do."""
    label = call.inputs[0].label
    plain = not (call.attribute("ellipsis_mask") or call.attribute("new_axis_mask"))
    for name, bounds in (("begin", begin), ("end", end)):
        if bounds.is_replicated:
            continue
        if bounds.numbers is None or not plain:
            return False
        for number, bound in enumerate(bounds.numbers.flat):
            if call.attribute(f"{name}_mask") >> number & 1 or (isinstance(label, Rows) and label.axis == number):
                continue
            if bound is None or bound.power:
                return False
    return True


def _sliced_numbers(call: Call) -> Value | None:
    """Returns the slice of a vector of known numbers; None if the bounds are unknown."""
    value, begin, end, strides = call.inputs
    assert value.numbers is not None
    try:
        first, last, step = begin.integers, end.integers, strides.integers
    except NoRuleError:
        return None
    if len(first) != 1 or call.attribute("new_axis_mask") or call.attribute("ellipsis_mask"):
        return None
    if call.attribute("shrink_axis_mask"):
        return of_numbers(sizes.array([value.numbers[first[0]]], ()), ())
    bounds = slice(
        None if call.attribute("begin_mask") else first[0], None if call.attribute("end_mask") else last[0], step[0]
    )
    return of_numbers(value.numbers[bounds])


@rule("StridedSliceGrad")
def _(call: Call) -> Value:
    shape, begin, end, strides, gradient = call.inputs
    if gradient.is_replicated and shape.is_replicated:
        return Value(
            gradient.label if is_zero(gradient.label) else REPLICATED,
            tuple(shape.numbers) if shape.numbers is not None else None,
        )
    dims = tuple(shape.numbers) if shape.numbers is not None else None
    if dims is None:
        raise NoRuleError("the shape is unknown")
    axes = _slices(call, dims, begin, end, strides)
    if not all(each.is_replicated for each in (begin, end)):
        raise NoRuleError("the bounds of a slice depend on rows")
    if not isinstance(gradient.label, Rows):
        if any(dim is None or dim.power for dim in dims):
            raise NoRuleError("a value that is no row is added to some rows")
        return Value(linear(gradient), dims)
    (own,) = [axis for axis in axes if axis.target == gradient.label.axis and axis.action != "index"]
    if own.action != "all" or dims[own.source] != gradient.label.size:
        raise NoRuleError("some rows are selected")
    return moved(gradient, own.source, dims)


@rule("Slice")
def _(call: Call) -> Value:
    value, begin, lengths = call.inputs
    if value.numbers is not None and begin.numbers is not None and lengths.numbers is not None:
        bounds = [slice(b, None if n < 0 else b + n) for b, n in zip(begin.integers, lengths.integers, strict=True)]
        return of_numbers(value.numbers[tuple(bounds)])
    if not isinstance(value.label, Rows):
        if not (begin.is_replicated and lengths.is_replicated):
            raise NoRuleError("the bounds of a slice depend on rows")
        return Value(moved(value, 0, None).label)
    if begin.numbers is None or lengths.numbers is None or not begin.is_replicated:
        raise NoRuleError("the bounds of a slice are unknown")
    axis = value.label.axis
    length = lengths.numbers[axis]
    is_whole = length is not None and (length.coefficient == -1 or length == value.label.size)
    others = [each for number, each in enumerate(lengths.numbers) if number != axis]
    if not _is_zero(begin.numbers[axis]) or not is_whole or any(each is None or each.power for each in others):
        raise NoRuleError("some rows are selected")
    return Value(value.label, tuple(dim if n == axis else None for n, dim in enumerate(value.known_dims)))


@rule("GatherV2", "Gather", "ResourceGather")
def _(call: Call) -> Value:
    values, indices = call.inputs[:2]
    is_named = call.kind == "GatherV2"
    axis = call.inputs[2].integers[0] if is_named else 0
    batch_dims = call.attribute("batch_dims") if call.kind != "Gather" else 0
    if values.numbers is not None and values.numbers.ndim == 1 and indices.numbers is not None:
        taken = [values.numbers[number] for number in indices.integers]
        return of_numbers(sizes.array(taken, indices.numbers.shape), indices.dims)
    if values.is_replicated and indices.is_replicated:
        return Value(REPLICATED)
    axis, batch_dims = axis % values.rank, batch_dims % indices.rank if batch_dims else 0
    dims = (*values.known_dims[:axis], *indices.known_dims[batch_dims:], *values.known_dims[axis + 1 :])
    of_values, of_indices = values.label, indices.label
    if isinstance(of_indices, Rows) and of_indices.power:
        raise NoRuleError("indices are divided by the number of rows")
    if isinstance(of_values, Rows) and isinstance(of_indices, Rows):
        if not of_values.axis == of_indices.axis < batch_dims or of_values.size != of_indices.size:
            raise NoRuleError("rows are selected by rows")
        return Value(of_values, dims)
    if isinstance(of_values, Replicated) and isinstance(of_indices, Rows) and of_indices.axis >= batch_dims:
        return Value(Rows(axis + of_indices.axis - batch_dims, of_indices.size, of_values.power), dims)
    if not indices.is_replicated:
        raise NoRuleError("indices depend on rows")
    if isinstance(of_values, Rows):
        if of_values.axis == axis or of_values.axis < batch_dims:
            raise NoRuleError("some rows are selected")
        added = indices.rank - batch_dims - 1
        return moved(values, of_values.axis + (added if axis < of_values.axis else 0), dims)
    return Value(moved(values, 0, None).label, dims)


@rule("GatherNd", "ResourceGatherNd")
def _(call: Call) -> Value:
    values, indices = call.inputs
    batch_dims = call.attribute("batch_dims") if call.kind == "ResourceGatherNd" else 0
    if all(value.is_replicated for value in call.inputs):
        return Value(REPLICATED)
    depth = int(indices.known_dims[-1]) if indices.known_dims[-1] is not None else 0
    dims = (*indices.known_dims[:-1], *values.known_dims[depth:]) if depth else None
    if isinstance(indices.label, Rows):
        is_index = not indices.label.power and indices.label.axis < indices.rank - 1
        if is_index and isinstance(values.label, Replicated) and not batch_dims:
            return Value(Rows(indices.label.axis, indices.label.size, values.label.power), dims)
        raise NoRuleError("rows are selected by rows")
    if not indices.is_replicated or isinstance(values.label, Rows) and values.label.axis < max(depth, 1):
        raise NoRuleError("some rows are selected")
    own_axis = values.label.axis - depth + indices.rank - 1 if isinstance(values.label, Rows) else 0
    return moved(values, own_axis, dims) if not batch_dims else Value(ALL_ROWS, dims)


def scattered(data: Value, indices: Value, target: Value | None) -> Label:
    """Returns the label of data that are added up where the indices say, in a tensor that does not depend on rows.

    Args:
      data: what is added; its first axes are those of the indices.
      indices: for each part of the data, where it goes.
      target: what it is added to; None for zeros.
    """
    if all(value.is_replicated for value in (data, indices)):
        label: Label = REPLICATED
    elif isinstance(indices.label, Rows) and not indices.label.power:
        if is_zero(data.label):
            label = Replicated(None)
        elif isinstance(data.label, Rows) and (data.label.axis, data.label.size) == (
            indices.label.axis,
            indices.label.size,
        ):
            label = Partial("sum", data.label.power or 0)
        elif isinstance(data.label, Replicated) and data.known_dims[: indices.label.axis + 1][-1:] in ((), (ONE,)):
            label = Partial("sum", data.label.power or 0)
        else:
            raise NoRuleError("rows are scattered by other rows")
    elif indices.is_replicated and isinstance(data.label, Partial | Replicated):
        label = linear(data)
    else:
        raise NoRuleError("rows are scattered")
    if target is None:
        return label
    return total([target.label, label])


@rule("UnsortedSegmentSum", "ScatterNd", "TensorScatterAdd", "TensorScatterUpdate", "TensorScatterSub")
def _(call: Call) -> Value:
    target: Value | None = None
    if call.kind == "UnsortedSegmentSum":
        data, indices, count = call.inputs
        if count.numbers is not None and any(each is None or each.power for each in count.numbers.flat):
            raise NoRuleError("the number of segments depends on rows")
        is_shape = count.is_replicated
    elif call.kind == "ScatterNd":
        indices, data, shape = call.inputs
        is_shape = shape.is_replicated
    else:
        target, indices, data = call.inputs
        is_shape = not isinstance(target.label, Rows)
    if not is_shape:
        raise NoRuleError("the shape depends on rows")
    if call.kind == "TensorScatterUpdate":
        return Value(REPLICATED if all(value.is_replicated for value in call.inputs) else ALL_ROWS)
    if call.kind == "TensorScatterSub":
        data = dataclasses.replace(data, label=linear(data))
    if isinstance(indices.label, Rows) and call.kind != "UnsortedSegmentSum" and indices.label.axis == indices.rank - 1:
        raise NoRuleError("the rows are the indices")
    return Value(scattered(data, indices, target))


@rule("OneHot")
def _(call: Call) -> Value:
    indices, *others = call.inputs
    axis = call.attribute("axis")
    at = indices.rank if axis < 0 else axis
    depth = others[0].numbers.item() if others[0].numbers is not None else None
    dims = (*indices.known_dims[:at], depth, *indices.known_dims[at:])
    if not all(value.is_replicated for value in others):
        raise NoRuleError("the depth or the values depend on rows")
    if isinstance(indices.label, Rows) and not indices.label.power:
        return Value(Rows(indices.label.axis + (at <= indices.label.axis), indices.label.size), dims)
    return Value(REPLICATED if indices.is_replicated else ALL_ROWS, dims)


@rule("SearchSorted", "LowerBound", "UpperBound")
def _(call: Call) -> Value:
    sequence, values = call.inputs
    if (
        sequence.is_replicated
        and isinstance(values.label, Rows)
        and sequence.rank == 2
        and sequence.known_dims[0] == ONE
    ):
        return Value(values.label if values.label.axis == 1 and not values.label.power else ALL_ROWS, values.dims)
    both = all(
        isinstance(value.label, Rows) and value.label.axis == 0 and not value.label.power for value in call.inputs
    )
    label = values.label if both and sequence.label.size == values.label.size else ALL_ROWS  # type: ignore[union-attr]
    return Value(REPLICATED if all(value.is_replicated for value in call.inputs) else label, values.dims)


@rule("Bucketize")
def _(call: Call) -> Value:
    (value,) = call.inputs
    return Value(
        REPLICATED
        if value.is_replicated
        else rows_label([value], 0)
        if isinstance(value.label, Rows) and not value.label.power
        else ALL_ROWS,
        value.dims,
    )


@rule("MatrixDiagV3", "MatrixDiagPartV3", "MatrixBandPart", "MatrixSetDiagV3")
def _(call: Call) -> Value:
    value, *others = call.inputs
    is_diagonal = call.kind == "MatrixDiagV3"
    if value.is_replicated and all(each.is_replicated for each in others):
        return Value(REPLICATED)
    if (
        call.kind == "MatrixSetDiagV3"
        or not all(each.is_replicated for each in others)
        or not isinstance(value.label, Rows)
    ):
        raise NoRuleError("only rows of matrices have a rule")
    inner = 1 if is_diagonal else 2
    if value.label.axis >= value.rank - inner or (value.label.power and call.kind != "MatrixBandPart"):
        raise NoRuleError("rows are rows of one matrix")
    dims = {
        "MatrixDiagV3": (*value.known_dims, value.known_dims[-1]),
        "MatrixDiagPartV3": (*value.known_dims[:-2], None),
        "MatrixBandPart": value.known_dims,
    }[call.kind]
    return Value(value.label, dims)
