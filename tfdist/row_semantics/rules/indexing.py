"""Rules for slices, gather and scatter operations, variables and lookup tables."""

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
    require,
    total,
)


class _Axis(NamedTuple):
    """The effect of a slice on one axis: it selects "all" or "part" of the axis, adds it ("new") or removes it ("index")."""

    action: str
    source: int  # axis of the sliced tensor
    target: int  # axis of the result
    dim: Size | None  # dim of the result along the axis


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
                is_unused = masks[name] >> number & 1 or (name == "end" and axes[-1].action == "index")
                require(is_unused or _is_replicated(bounds, number), "the bounds of a slice depend on rows")
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
    """Returns the length of a slice that omits elements at the start and end of an axis; None if unknown."""
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
    require(row_axis.action == "all", "some rows are selected")
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
    dims = shape.flat_numbers
    axes = _slices(call, dims, begin, end, strides)
    if not isinstance(gradient.label, Rows):
        has_rows = any(dim is None or dim.power for dim in dims)
        require(not has_rows, "a value that is not rows is added to some rows")
        return Value(linear(gradient), dims)
    (row_axis,) = [axis for axis in axes if axis.target == gradient.label.axis and axis.action != "index"]
    is_whole = row_axis.action == "all" and dims[row_axis.source] == gradient.label.size
    require(is_whole, "some rows are selected")
    return rearrange(gradient, dims, lambda _: row_axis.source)


@rule("Slice")
def _(call: Call) -> Value:
    value, begin, lengths = call.inputs
    if value.numbers is not None and begin.numbers is not None and lengths.numbers is not None:
        bounds = [slice(b, None if n < 0 else b + n) for b, n in zip(begin.integers, lengths.integers, strict=True)]
        return numeric_value(value.numbers[tuple(bounds)])
    axes = range(value.rank)
    row_axis = value.label.axis if isinstance(value.label, Rows) else None
    are_replicated = [_is_replicated(bound, axis) for bound in (begin, lengths) for axis in axes if axis != row_axis]
    require(all(are_replicated), "the bounds of a slice depend on rows")
    if row_axis is not None:
        is_whole = lengths.flat_numbers[row_axis] in (value.known_dims[row_axis], sizes.size(-1))
        require(_is_zero(begin.flat_numbers[row_axis]) and is_whole, "some rows are selected")
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
        require(not index_label.power, "indices are divided by the number of rows")
        if isinstance(value_label, Rows):
            are_same_rows = value_label.axis == index_label.axis < batch_dims and value_label.size == index_label.size
            require(are_same_rows, "indices that depend on rows select rows")
            return Value(value_label, dims)
        is_table = isinstance(value_label, Replicated) and index_label.axis >= batch_dims
        require(is_table, "indices that depend on rows select from a tensor that is not replicated")
        return Value(Rows(axis + index_label.axis - batch_dims, index_label.size, value_label.power), dims)
    require(indices.is_replicated, "indices depend on rows")
    if not isinstance(value_label, Rows):
        return rearrange(values, dims)
    require(batch_dims <= value_label.axis != axis, "some rows are selected")
    return rearrange(values, dims, lambda rows: rows + (indices.rank - batch_dims - 1) * (axis < rows))


def _table(call: Call) -> Value:
    """Returns the value of the tensor from which elements are selected, which may be that of a variable."""
    if not call.kind.startswith("Resource"):
        return call.inputs[0]
    require(not call.attribute("batch_dims"), "batch dims are not supported for variables")
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
        raise NoRuleError("the number of indexed axes is unknown")
    dims = (*indices.known_dims[:-1], *values.known_dims[int(depth) :])
    if isinstance(indices.label, Rows):
        are_of_rows = not indices.label.power and indices.label.axis < indices.rank - 1
        require(are_of_rows and isinstance(values.label, Replicated), "indices that depend on rows select rows")
        return Value(Rows(indices.label.axis, indices.label.size, values.label.power), dims)
    require(indices.is_replicated, "indices depend on rows")
    if not isinstance(values.label, Rows):
        return rearrange(values, dims)
    require(values.label.axis >= int(depth), "some rows are selected")
    return rearrange(values, dims, lambda rows: rows - int(depth) + indices.rank - 1)


def scatter_label(data: Value, indices: Value, *, has_index_vectors: bool) -> Label:
    """Returns the label of a tensor in which each element of `data` is added at an index.

    The first axes of `data` are those of the indices, unless it is a scalar. `has_index_vectors` indicates whether the last
    axis of the indices has an index for each axis of the result.
    """
    if isinstance(indices.label, Rows) and not indices.label.power:
        are_vectors = has_index_vectors and indices.label.axis == indices.rank - 1
        require(not are_vectors, "the rows are along the axis of the index vectors")
        if isinstance(data.label, Rows):
            is_same = (data.label.axis, data.label.size) == (indices.label.axis, indices.label.size)
        else:
            is_same = isinstance(data.label, Replicated) and data.rank == 0
        require(is_same, "the data and the indices have different rows")
        return ZEROS if is_zero(data.label) else Partial("sum", data.label.power or 0)
    is_replicated = indices.is_replicated and not isinstance(data.label, Rows)
    require(is_replicated, "rows are scattered by replicated indices, or the indices are scaled or depend on all rows")
    return linear(data)


@rule("UnsortedSegmentSum", "ScatterNd")
def _(call: Call) -> Value:
    is_segments = call.kind == "UnsortedSegmentSum"
    data, indices, shape = call.inputs if is_segments else (call.inputs[1], call.inputs[0], call.inputs[2])
    require(shape.is_replicated, "the shape depends on rows")
    label = data.label
    if is_segments and isinstance(label, Rows) and indices.is_replicated and label.axis >= indices.rank:
        axis = label.axis - indices.rank + 1  # sums parts of each row
        number = None if shape.numbers is None else shape.numbers.item()
        return Value(dataclasses.replace(label, axis=axis), (number, *data.known_dims[indices.rank :]))
    return Value(scatter_label(data, indices, has_index_vectors=not is_segments))


@rule("TensorScatterAdd", "TensorScatterSub")
def _(call: Call) -> Value:
    target, indices, data = call.inputs
    require(not isinstance(target.label, Rows), "a tensor is added to rows")
    return Value(total([target.label, scatter_label(data, indices, has_index_vectors=True)]), target.dims)


@rule("OneHot")
def _(call: Call) -> Value:
    indices, depth, *on_off_values = call.inputs
    axis, label = call.attribute("axis"), indices.rows
    position = indices.rank if axis < 0 else axis
    are_replicated = all(value.is_replicated for value in (depth, *on_off_values))
    require(are_replicated and not label.power, "the depth or the values depend on rows, or the indices are scaled")
    number = None if depth.numbers is None else depth.numbers.item()
    dims = (*indices.known_dims[:position], number, *indices.known_dims[position:])
    return Value(Rows(label.axis + (position <= label.axis), label.size), dims)


@rule("LowerBound", "UpperBound")
def _(call: Call) -> Value:
    """The outputs are positions in a sorted sequence, which is equal on all replicas or belongs to the same row."""
    sequence, values = call.inputs
    is_valid = sequence.is_replicated or sequence.rows.axis == 0 and not sequence.rows.power
    has_rows = values.rows.axis == (1 if sequence.is_replicated else 0) and not values.rows.power
    require(is_valid and has_rows, "values of a row are searched for in other rows")
    return Value(dataclasses.replace(values.rows, power=0), values.dims)


@rule("MatrixDiagV3", "MatrixDiagPartV3", "MatrixBandPart")
def _(call: Call) -> Value:
    """The operation is a function of each matrix or diagonal."""
    value, *parameters = call.inputs
    label, rank = value.rows, call.operation.outputs[0].shape.rank
    require(all(parameter.is_replicated for parameter in parameters), "the parameters depend on rows")
    outer = value.rank - (1 if call.kind == "MatrixDiagV3" else 2)
    require(call.kind != "MatrixDiagV3" or rank == value.rank + 1, "there are several diagonals")
    is_unscaled = not label.power or call.kind == "MatrixBandPart"
    require(label.axis < outer and is_unscaled, "the rows of the batch are rows of one matrix")
    return Value(label, (*value.known_dims[:outer], *[None] * (rank - outer)))


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
    require(not isinstance(old.label, Rows), "the variable has rows")
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
