"""Slices, gathering and scattering, variables and tables."""

import dataclasses
from typing import NamedTuple

from tfdist.row_semantics import sizes
from tfdist.row_semantics.rules.elementwise import add_or_subtract, linear, pointwise
from tfdist.row_semantics.rules.registry import Call, rule
from tfdist.row_semantics.rules.shapes import rearrange
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
    is_zero,
    numeric_value,
    total,
)


class _Axis(NamedTuple):
    """The effect of a slice on one axis: it selects "all" or "part" of the axis, adds it ("new") or removes it ("index")."""

    action: str
    source: int
    target: int
    dim: Size | None  # of the result


def _slices(call: Call, dims: Dims, begin: Value, end: Value, strides: Value) -> list[_Axis]:
    """Returns the axes of a strided slice of a tensor with the dims `dims`."""
    masks = {name: call.attribute(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    steps = strides.integers
    count = len(steps)
    kept_axes = sum(not (masks["new_axis"] | masks["ellipsis"]) >> number & 1 for number in range(count))
    axes: list[_Axis] = []
    source = target = 0

    def add(action: str, dim: Size | None = ONE) -> None:
        nonlocal source, target
        axes.append(_Axis(action, source, target, dims[source] if action == "all" else dim))
        source += action != "new"
        target += action != "index"

    for number in range(count):
        if masks["ellipsis"] >> number & 1:
            for _ in range(len(dims) - kept_axes):
                add("all")
        elif masks["new_axis"] >> number & 1:
            add("new")
        elif masks["shrink_axis"] >> number & 1:
            add("index")
        else:
            is_all = _is_all(masks, number, steps[number], begin, end, dims[source])
            add("all" if is_all else "part", _length(masks, number, steps[number], begin, end, dims[source]))
        if axes and axes[-1].action in ("part", "index"):
            for name, bounds in (("begin", begin), ("end", end)):
                is_used = not masks[name] >> number & 1 and not (name == "end" and axes[-1].action == "index")
                if is_used and not _is_replicated(bounds, number):
                    raise NoRuleError("the bounds of a slice depend on rows")
    while source < len(dims):
        add("all")
    return axes


def _is_all(masks: dict[str, int], number: int, step: int, begin: Value, end: Value, dim: Size | None) -> bool:
    """Returns whether a slice selects a whole axis."""
    starts = masks["begin"] >> number & 1 or (begin.numbers is not None and _is_zero(begin.numbers.flat[number]))
    ends = masks["end"] >> number & 1 or (
        end.numbers is not None and dim is not None and end.numbers.flat[number] == dim
    )
    return step == 1 and bool(starts) and bool(ends)


def _length(masks: dict[str, int], number: int, step: int, begin: Value, end: Value, dim: Size | None) -> Size | None:
    """Returns the length of an axis without some elements at its start and end; None if unknown."""
    try:
        first = 0 if masks["begin"] >> number & 1 else begin.integers[number]
        last = 0 if masks["end"] >> number & 1 else end.integers[number]
    except NoRuleError:
        return None
    is_shorter = step == 1 and first >= 0 >= last and dim is not None and not dim.power
    return sizes.shorten(dim, first - last) if is_shorter else None  # type: ignore[arg-type]


def _is_zero(number: Size | None) -> bool:
    return number is not None and not number.coefficient


@rule("StridedSlice")
def _(call: Call) -> Value:
    value, begin, end, strides = call.inputs
    if value.numbers is not None and value.numbers.ndim == 1 and (numbers := _slice_numbers(call)) is not None:
        return numbers
    axes = _slices(call, value.known_dims, begin, end, strides)
    dims = tuple(axis.dim for axis in axes if axis.action != "index")
    if not isinstance(value.label, Rows):
        return rearrange(value, dims)
    (row_axis,) = [axis for axis in axes if axis.source == value.label.axis and axis.action != "new"]
    if row_axis.action != "all":
        raise NoRuleError("some rows are selected")
    return rearrange(value, dims, lambda _: row_axis.target)


def _is_replicated(bounds: Value, number: int) -> bool:
    """Returns whether a bound of a slice is equal on all replicas."""
    bound = None if bounds.numbers is None else bounds.numbers.flat[number]
    return bounds.is_replicated or (bound is not None and not bound.power)


def _slice_numbers(call: Call) -> Value | None:
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
        return numeric_value(sizes.array([value.numbers[first[0]]], ()), ())
    bounds = slice(
        None if call.attribute("begin_mask") else first[0], None if call.attribute("end_mask") else last[0], step[0]
    )
    return numeric_value(value.numbers[bounds])


@rule("StridedSliceGrad")
def _(call: Call) -> Value:
    shape, begin, end, strides, gradient = call.inputs
    if shape.numbers is None:
        raise NoRuleError("the shape is unknown")
    dims = tuple(shape.numbers)
    axes = _slices(call, dims, begin, end, strides)
    if not isinstance(gradient.label, Rows):
        if any(dim is None or dim.power for dim in dims):
            raise NoRuleError("a value other than rows is added to some rows")
        return Value(linear(gradient), dims)
    (row_axis,) = [axis for axis in axes if axis.target == gradient.label.axis and axis.action != "index"]
    if row_axis.action != "all" or dims[row_axis.source] != gradient.label.size:
        raise NoRuleError("some rows are selected")
    return rearrange(gradient, dims, lambda _: row_axis.source)


@rule("Slice")
def _(call: Call) -> Value:
    value, begin, lengths = call.inputs
    if value.numbers is not None and begin.numbers is not None and lengths.numbers is not None:
        bounds = [slice(b, None if n < 0 else b + n) for b, n in zip(begin.integers, lengths.integers, strict=True)]
        return numeric_value(value.numbers[tuple(bounds)])
    axes = range(value.rank)
    row_axis = value.label.axis if isinstance(value.label, Rows) else None
    if not all(_is_replicated(bound, axis) for bound in (begin, lengths) for axis in axes if axis != row_axis):
        raise NoRuleError("the bounds of a slice depend on rows")
    if row_axis is not None:
        if begin.numbers is None or lengths.numbers is None:
            raise NoRuleError("the bounds of a slice are unknown")
        is_whole = lengths.numbers[row_axis] in (value.known_dims[row_axis], sizes.size(-1))
        if not _is_zero(begin.numbers[row_axis]) or not is_whole:
            raise NoRuleError("some rows are selected")
    return rearrange(value, tuple(dim if axis == row_axis else None for axis, dim in enumerate(value.known_dims)))


@rule("GatherV2", "Gather", "ResourceGather")
def _(call: Call) -> Value:
    values, indices = _table(call), call.inputs[1]
    axis = call.inputs[2].integers[0] if call.kind == "GatherV2" else 0
    batch_dims = call.attribute("batch_dims") if call.kind != "Gather" else 0
    if values.numbers is not None and values.numbers.ndim == 1 and indices.numbers is not None:
        elements = [values.numbers[number] for number in indices.integers]
        return numeric_value(sizes.array(elements, indices.numbers.shape), indices.dims)
    axis, batch_dims = axis % values.rank, batch_dims if batch_dims >= 0 else batch_dims + indices.rank
    dims = (*values.known_dims[:axis], *indices.known_dims[batch_dims:], *values.known_dims[axis + 1 :])
    value_label, index_label = values.label, indices.label
    if isinstance(index_label, Rows):
        if index_label.power:
            raise NoRuleError("indices are divided by the number of rows")
        if isinstance(value_label, Rows):
            if not value_label.axis == index_label.axis < batch_dims or value_label.size != index_label.size:
                raise NoRuleError("rows are selected by rows")
            return Value(value_label, dims)
        if not isinstance(value_label, Replicated) or index_label.axis < batch_dims:
            raise NoRuleError("rows select from a tensor that is not replicated")
        return Value(Rows(axis + index_label.axis - batch_dims, index_label.size, value_label.power), dims)
    if not indices.is_replicated:
        raise NoRuleError("indices depend on rows")
    if not isinstance(value_label, Rows):
        return rearrange(values, dims)
    if value_label.axis == axis or value_label.axis < batch_dims:
        raise NoRuleError("some rows are selected")
    return rearrange(values, dims, lambda rows: rows + (indices.rank - batch_dims - 1) * (axis < rows))


def _table(call: Call) -> Value:
    """Returns the tensor that the indices select from, which may be the value of a variable."""
    if not call.kind.startswith("Resource"):
        return call.inputs[0]
    if call.attribute("batch_dims"):
        raise NoRuleError("there are batch dims")
    variable, indices, result = call.variable(0), call.inputs[1], call.operation.outputs[0].shape
    if variable.dims is not None:
        return variable
    is_scalar = call.kind == "ResourceGather"  # whether an index is a scalar, not a vector
    index_count = 1 if is_scalar else int(indices.known_dims[-1] or 0)
    item_shape = result[indices.rank - (not is_scalar) :]
    return dataclasses.replace(variable, dims=(*[None] * index_count, *[dim and sizes.size(dim) for dim in item_shape]))


@rule("GatherNd", "ResourceGatherNd")
def _(call: Call) -> Value:
    values, indices = _table(call), call.inputs[1]
    depth = indices.known_dims[-1]
    if depth is None or not depth.is_known:
        raise NoRuleError("the number of axes that are indexed is unknown")
    dims = (*indices.known_dims[:-1], *values.known_dims[int(depth) :])
    if isinstance(indices.label, Rows):
        if indices.label.power or indices.label.axis == indices.rank - 1 or not isinstance(values.label, Replicated):
            raise NoRuleError("rows are selected by rows")
        return Value(Rows(indices.label.axis, indices.label.size, values.label.power), dims)
    if not indices.is_replicated:
        raise NoRuleError("indices depend on rows")
    if not isinstance(values.label, Rows):
        return rearrange(values, dims)
    if values.label.axis < int(depth):
        raise NoRuleError("some rows are selected")
    return rearrange(values, dims, lambda rows: rows - int(depth) + indices.rank - 1)


def scatter_label(data: Value, indices: Value, *, has_index_vectors: bool) -> Label:
    """Returns the label of a sum of data at indices.

    Args:
      data: the summands; their first axes are those of the indices, unless they are a scalar.
      indices: index of each summand in the result.
      has_index_vectors: whether the last axis of the indices has an index for each axis.
    """
    if isinstance(indices.label, Rows) and not indices.label.power:
        if has_index_vectors and indices.label.axis == indices.rank - 1:
            raise NoRuleError("the rows are the indices")
        if isinstance(data.label, Rows):
            is_same = (data.label.axis, data.label.size) == (indices.label.axis, indices.label.size)
        else:
            is_same = isinstance(data.label, Replicated) and data.rank == 0
        if not is_same:
            raise NoRuleError("rows are scattered by other rows")
        return ZEROS if is_zero(data.label) else Partial("sum", data.label.power or 0)  # type: ignore[union-attr]
    if not indices.is_replicated or isinstance(data.label, Rows):
        raise NoRuleError("rows are scattered, or indices depend on them")
    return linear(data)


@rule("UnsortedSegmentSum", "ScatterNd")
def _(call: Call) -> Value:
    is_segments = call.kind == "UnsortedSegmentSum"
    data, indices, shape = call.inputs if is_segments else (call.inputs[1], call.inputs[0], call.inputs[2])
    if not shape.is_replicated:
        raise NoRuleError("the shape depends on rows")
    label = data.label
    if is_segments and isinstance(label, Rows) and indices.is_replicated and label.axis >= indices.rank:
        axis = label.axis - indices.rank + 1  # sums parts of each row
        number = None if shape.numbers is None else shape.numbers.item()
        return Value(dataclasses.replace(label, axis=axis), (number, *data.known_dims[indices.rank :]))
    return Value(scatter_label(data, indices, has_index_vectors=not is_segments))


@rule("TensorScatterAdd", "TensorScatterSub")
def _(call: Call) -> Value:
    target, indices, data = call.inputs
    if isinstance(target.label, Rows):
        raise NoRuleError("it is added to rows")
    return Value(total([target.label, scatter_label(data, indices, has_index_vectors=True)]), target.dims)


@rule("OneHot")
def _(call: Call) -> Value:
    indices, depth, *on_off_values = call.inputs
    axis = call.attribute("axis")
    position = indices.rank if axis < 0 else axis
    if not isinstance(indices.label, Rows) or indices.label.power:
        raise NoRuleError("the indices are not rows")
    if not all(value.is_replicated for value in (depth, *on_off_values)):
        raise NoRuleError("the depth or the values depend on rows")
    number = None if depth.numbers is None else depth.numbers.item()
    dims = (*indices.known_dims[:position], number, *indices.known_dims[position:])
    return Value(Rows(indices.label.axis + (position <= indices.label.axis), indices.label.size), dims)


@rule("LowerBound", "UpperBound")
def _(call: Call) -> Value:
    """Positions of values in a sorted sequence, which is equal on all replicas or belongs to the same row."""
    sequence, values = call.inputs
    if sequence.is_replicated:
        is_valid, axis = True, 1
    else:
        is_valid, axis = isinstance(sequence.label, Rows) and not sequence.label.power and not sequence.label.axis, 0
    if not is_valid or not isinstance(values.label, Rows) or values.label.axis != axis or values.label.power:
        raise NoRuleError("values of a row are searched in other rows")
    return Value(dataclasses.replace(values.label, power=0), values.dims)


@rule("MatrixDiagV3", "MatrixDiagPartV3", "MatrixBandPart")
def _(call: Call) -> Value:
    """Functions of each matrix, or of each diagonal."""
    value, *parameters = call.inputs
    if not all(parameter.is_replicated for parameter in parameters) or not isinstance(value.label, Rows):
        raise NoRuleError("the matrices are not rows of the batch")
    inner = 1 if call.kind == "MatrixDiagV3" else 2
    outer = value.rank - inner
    if call.kind == "MatrixDiagV3" and call.operation.outputs[0].shape.rank != value.rank + 1:
        raise NoRuleError("there are several diagonals")
    if value.label.axis >= outer or (value.label.power and call.kind != "MatrixBandPart"):
        raise NoRuleError("the rows of the batch are rows of one matrix")
    diagonal_rank = call.operation.outputs[0].shape.rank - outer
    return Value(value.label, (*value.known_dims[:outer], *[None] * diagonal_rank))


@rule("ReadVariableOp")
def _(call: Call) -> Value:
    return call.variable(0)


@rule("VariableShape")
def _(call: Call) -> Value:
    variable = call.variable(0)
    if variable.dims is None:
        return Value(variable.label if variable.is_replicated else ALL_ROWS)
    return numeric_value(sizes.array(variable.dims))


@rule("AssignVariableOp")
def _(call: Call) -> list[Value]:
    call.assign(0, call.inputs[1])
    return []


@rule("AssignAddVariableOp", "AssignSubVariableOp")
def _(call: Call) -> list[Value]:
    old, change = call.variable(0), call.inputs[1]
    dims = old.dims or change.dims
    if old.dims is None:
        old = dataclasses.replace(old, dims=dims)
    call.assign(0, Value(add_or_subtract(old, change, is_difference=call.kind == "AssignSubVariableOp"), dims))
    return []


@rule("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterNdAdd")
def _(call: Call) -> list[Value]:
    old = call.variable(0)
    indices, updates = call.inputs[1:]
    if isinstance(old.label, Rows):
        raise NoRuleError("the variable has rows")
    change = Value(scatter_label(updates, indices, has_index_vectors=call.kind == "ResourceScatterNdAdd"))
    call.assign(0, Value(add_or_subtract(old, change, is_difference=call.kind == "ResourceScatterSub"), old.dims))
    return []


@rule("LookupTableFindV2")
def _(call: Call) -> Value:
    _, keys, default = call.inputs
    return Value(pointwise([keys]) if default.is_replicated and call.variable(0).is_replicated else ALL_ROWS, keys.dims)


@rule("LookupTableSizeV2")
def _(call: Call) -> Value:
    return Value(REPLICATED if call.variable(0).is_replicated else ALL_ROWS)
