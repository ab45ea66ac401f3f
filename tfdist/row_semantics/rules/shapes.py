"""Rules for shape operations, operations that rearrange elements, and the tensor lists in which loops accumulate results."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfdist.row_semantics import sizes
from tfdist.row_semantics.rules.elementwise import choice, linear, pointwise
from tfdist.row_semantics.rules.registry import Call, rule
from tfdist.row_semantics.sizes import ONE, Size, symbol
from tfdist.row_semantics.values import (
    ALL_ROWS,
    REPLICATED,
    UNWRITTEN,
    ZEROS,
    AllRows,
    Dims,
    Label,
    Replicated,
    Rows,
    Value,
    is_zero,
    join,
    join_values,
    numeric_value,
    require,
    without_base,
)

_MAX_NUMBERS = 32  # maximum number of elements of a tensor whose elements are tracked


@rule("Const")
def _(call: Call) -> Value:
    value = call.operation.node_def.attr["value"].tensor
    array = tf.make_ndarray(value)
    if array.size <= _MAX_NUMBERS and array.dtype.kind in "iuf" and np.isfinite(array).all():
        return numeric_value(sizes.array(map(sizes.size, array.ravel().tolist()), array.shape))
    is_zero = array.dtype.kind in "iufb" and array.size and not array.any()
    return Value(ZEROS if is_zero else REPLICATED)


@rule("Shape", "ShapeN")
def _(call: Call) -> list[Value]:
    dims_of_inputs = (value.dims for value in call.inputs)
    return [
        Value(ALL_ROWS) if dims is None else numeric_value(sizes.array(dims), (sizes.size(len(dims)),))
        for dims in dims_of_inputs
    ]


@rule("Size")
def _(call: Call) -> Value:
    return numeric_value(sizes.array([sizes.product(call.inputs[0].known_dims)], ()), ())


@rule("Rank")
def _(call: Call) -> Value:
    return numeric_value(sizes.array([sizes.size(call.inputs[0].rank)], ()), ())


@rule("Reshape")
def _(call: Call) -> Value:
    value, shape = call.inputs
    dims = _resolve_shape(value, list(shape.flat_numbers))
    if value.numbers is not None and all(dim is not None and dim.is_known for dim in dims):
        lengths = [int(dim) for dim in dims if dim is not None]
        return Value(value.label, dims, value.numbers.reshape(tuple(lengths)))
    label = value.label
    if isinstance(label, Rows):
        return Value(_reshape_label(label, value.known_dims, dims), dims)
    is_known = shape.is_replicated or not any(dim is None or dim.power for dim in dims)
    return Value(without_base(label) if is_known else ALL_ROWS, dims)


def _resolve_shape(value: Value, shape: list[Size | None]) -> Dims:
    """Returns the dims of a reshaped tensor, with -1 resolved."""
    free = [number for number, dim in enumerate(shape) if dim is not None and dim.coefficient == -1]
    if free:
        known_size = sizes.product(dim for number, dim in enumerate(shape) if number != free[0])
        total = sizes.product(value.dims) if value.dims is not None else None
        shape[free[0]] = total.divided_by(known_size) if total is not None and known_size is not None else None
    return tuple(shape)


def _reshape_label(label: Rows, old: Dims, new: Dims) -> Label:
    """Returns the label of reshaped rows: the elements of a row must stay contiguous, after the same outer dims."""
    axes = [axis for axis, dim in enumerate(new) if dim is None or dim.power]
    if len(axes) != 1 or (size := new[axes[0]]) is None:
        return ALL_ROWS
    outer, total = sizes.product(new[: axes[0]]), sizes.product(new)
    keeps_rows = outer is not None and outer == sizes.product(old[: label.axis]) and total == sizes.product(old)
    return Rows(axes[0], size, label.power) if _is_row_multiple(size) and keeps_rows else ALL_ROWS


def rearrange(value: Value, dims: Dims | None, new_axis: Callable[[int], int] = lambda axis: axis) -> Value:
    """Returns a value with rearranged elements; `new_axis` converts the axis of the rows to the new axis."""
    label = value.label
    if isinstance(label, Rows):
        return Value(dataclasses.replace(label, axis=new_axis(label.axis)), dims)
    return Value(without_base(label), dims)


@rule("Transpose", "ConjugateTranspose")
def _(call: Call) -> Value:
    value, permutation = call.inputs
    order = permutation.integers
    if value.numbers is not None:
        return numeric_value(np.transpose(value.numbers, order))
    return rearrange(value, tuple(value.known_dims[number] for number in order), order.index)


@rule("ExpandDims")
def _(call: Call) -> Value:
    value, position = call.inputs
    new_axis = position.integers[0] % (value.rank + 1)
    dims = (*value.known_dims[:new_axis], ONE, *value.known_dims[new_axis:])
    numbers = None if value.numbers is None else np.expand_dims(value.numbers, new_axis)
    return dataclasses.replace(rearrange(value, dims, lambda axis: axis + (new_axis <= axis)), numbers=numbers)


@rule("Squeeze")
def _(call: Call) -> Value:
    (value,) = call.inputs
    axis_set = {axis % value.rank for axis in call.attribute("squeeze_dims")}
    are_known = all(dim is not None and dim.is_known for dim in value.known_dims)
    require(axis_set or are_known, "dims of size 1 are unknown")
    axes = axis_set or {axis for axis, dim in enumerate(value.known_dims) if dim == ONE}
    dims = tuple(dim for axis, dim in enumerate(value.known_dims) if axis not in axes)
    numbers = None if value.numbers is None else np.squeeze(value.numbers, tuple(axes))
    require(not isinstance(value.label, Rows) or value.label.axis not in axes, "the dim of the rows is removed")
    result = rearrange(value, dims, lambda axis: axis - sum(removed < axis for removed in axes))
    return result if isinstance(value.label, Rows) else dataclasses.replace(result, numbers=numbers)


@rule("Pack")
def _(call: Call) -> Value:
    values = call.inputs
    arrays = [value.numbers for value in values if value.numbers is not None]
    if len(arrays) == len(values):
        return numeric_value(np.stack(arrays, call.attribute("axis")))
    if arrays and all(value.dims == () for value in values):
        numbers = sizes.array([None if value.numbers is None else value.numbers.item() for value in values])
        result = numeric_value(numbers, (sizes.size(len(values)),))
        unknown = [value for value in values if value.numbers is None]
        if unknown and all(value.is_replicated or not isinstance(value.label, AllRows) for value in values):
            return dataclasses.replace(result, label=join([value.label for value in values]))
        return result
    rank = values[0].rank + 1
    position = call.attribute("axis") % rank
    dims = (*values[0].known_dims[:position], sizes.size(len(values)), *values[0].known_dims[position:])
    return rearrange(Value(choice(values, values)), dims, lambda axis: axis + (position <= axis))


@rule("Unpack")
def _(call: Call) -> list[Value]:
    (value,) = call.inputs
    position = call.attribute("axis") % value.rank
    dims = value.known_dims[:position] + value.known_dims[position + 1 :]
    if value.numbers is not None and value.numbers.ndim == 1:
        return [numeric_value(sizes.array([number], ()), ()) for number in value.numbers]
    require(not isinstance(value.label, Rows) or value.label.axis != position, "the batch axis is split")
    return [rearrange(value, dims, lambda axis: axis - (position < axis))] * len(call.operation.outputs)


@rule("Split", "SplitV")
def _(call: Call) -> list[Value]:
    value, axis = (call.inputs[1], call.inputs[0]) if call.kind == "Split" else (call.inputs[0], call.inputs[2])
    split_axis = axis.integers[0] % value.rank
    require(call.kind == "Split" or call.inputs[1].is_replicated, "the sizes depend on rows")
    if call.kind == "SplitV" and value.numbers is not None and min(lengths := call.inputs[1].integers) >= 0:
        return [numeric_value(part) for part in np.split(value.numbers, np.cumsum(lengths)[:-1], split_axis)]
    require(not isinstance(value.label, Rows) or value.label.axis != split_axis, "the batch axis is split")
    dims = tuple(None if number == split_axis else dim for number, dim in enumerate(value.known_dims))
    return [rearrange(value, dims)] * len(call.operation.outputs)


@rule("ConcatV2")
def _(call: Call) -> Value:
    *values, axis = call.inputs
    if all(value.numbers is not None and value.numbers.ndim == 1 for value in values):
        return numeric_value(np.concatenate([value.numbers for value in values]))
    concat_axis, ranks = axis.integers[0] % values[0].rank, {value.rank for value in values}
    total: Size | None = sizes.size(0)
    for part in [value.known_dims[concat_axis] for value in values]:
        total = None if total is None or part is None else total + part

    def with_dim(value: Value, size: Size | None) -> Dims:
        return tuple(size if number == concat_axis else dim for number, dim in enumerate(value.known_dims))

    dims = with_dim(values[0], total)
    if not any(isinstance(value.label, Rows) for value in values):
        return Value(without_base(join([value.label for value in values])), dims)
    are_whole = all(value.rows.axis != concat_axis for value in values) and len(ranks) == 1
    require(are_whole, "rows are concatenated along the batch axis, or with values that are not rows")
    aligned = [dataclasses.replace(value, dims=with_dim(value, ONE)) for value in values]
    return Value(choice(aligned, aligned), dims)


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def _(call: Call) -> Value:
    value, padding, *constants = call.inputs
    are_replicated = padding.is_replicated and all(constant.is_replicated for constant in constants)
    require(are_replicated, "the padding depends on rows")
    if constants and not is_zero(constants[0].label):
        value = dataclasses.replace(value, label=pointwise([value]))
    if not isinstance(value.label, Rows):
        return Value(linear(value))
    row_axis, numbers = value.label.axis, padding.flat_numbers
    adds_rows = any(number is None or number.coefficient for number in numbers[2 * row_axis : 2 * row_axis + 2])
    require(not adds_rows, "rows are padded")
    return Value(linear(value), tuple(dim if axis == row_axis else None for axis, dim in enumerate(value.known_dims)))


def broadcast(value: Value, dims: Dims) -> Value:
    """Returns a value broadcast to these dims."""
    rows = [axis for axis, dim in enumerate(dims) if dim is None or dim.power]
    label = value.label
    if isinstance(label, Rows):
        axis = label.axis + len(dims) - value.rank
        require(rows == [axis] and dims[axis] == label.size, "rows are repeated")
        return Value(Rows(axis, label.size, label.power), dims)
    if not rows or isinstance(label, AllRows):
        return Value(without_base(label), dims)
    size = dims[rows[0]]
    is_repeated = len(rows) == 1 and isinstance(label, Replicated) and _is_row_multiple(size)
    require(is_repeated, "a value that differs between replicas is broadcast along the batch axis")
    return Value(Rows(rows[0], size, label.power), dims)  # type: ignore[arg-type]


def _is_row_multiple(size: Size | None) -> bool:
    """Returns whether a dim is an integer multiple of the number of rows."""
    return size is not None and size.power == 1 and size.is_integer


@rule("Fill")
def _(call: Call) -> Value:
    shape, value = call.inputs
    if shape.numbers is None and shape.is_replicated and is_zero(value.label):
        return Value(ZEROS)
    dims = shape.flat_numbers
    if value.numbers is not None and len(dims) < 2 and all(dim is not None and dim.is_known for dim in dims):
        lengths = [int(dim) for dim in dims if dim is not None]
        if sum(lengths) <= _MAX_NUMBERS:
            return numeric_value(np.full(lengths, value.numbers.item(), object), dims)
    return broadcast(dataclasses.replace(value, dims=()), dims)


@rule("BroadcastTo")
def _(call: Call) -> Value:
    value, dims = call.inputs[0], call.inputs[1].flat_numbers
    pairs = zip(reversed(dims), reversed(value.known_dims), strict=False)
    are_equal = all(new == ONE or old in (ONE, new) for new, old in pairs)
    require(are_equal or isinstance(value.label, Rows), "dims cannot be compared")
    return broadcast(value, dims)


@rule("Tile")
def _(call: Call) -> Value:
    value, factors = call.inputs[0], call.inputs[1].flat_numbers
    dims = tuple(None if a is None or b is None else a * b for a, b in zip(value.known_dims, factors, strict=True))
    return broadcast(value, dims)


@rule("Range")
def _(call: Call) -> Value:
    start, limit, step = (bound.integers[0] for bound in call.inputs)
    numbers, is_integer = range(start, limit, step), call.operation.outputs[0].dtype.is_integer
    require(is_integer and len(numbers) <= _MAX_NUMBERS, "the range is not of integers, or has too many elements")
    return numeric_value(sizes.array(map(sizes.size, numbers)))


@rule("ConcatOffset")
def _(call: Call) -> list[Value]:
    axis, *shapes = call.inputs
    axis_number, offset = axis.integers[0], sizes.size(0)
    results = []
    for shape in shapes:
        numbers = sizes.array([sizes.size(0)] * len(shape.known_numbers))
        numbers[axis_number] = offset
        results.append(numeric_value(numbers))
        offset = None if offset is None else offset + shape.known_numbers[axis_number]
    return results


@rule("InvertPermutation")
def _(call: Call) -> Value:
    order = call.inputs[0].integers
    return numeric_value(sizes.array([sizes.size(order.index(number)) for number in range(len(order))]))


@rule("DynamicStitch", "ParallelDynamicStitch")
def _(call: Call) -> Value:
    count = len(call.inputs) // 2
    indices, data = call.inputs[:count], call.inputs[count:]
    elements: dict[int, Size | None] = {}
    for positions, value in zip(indices, data, strict=True):
        elements.update(zip(positions.integers, value.flat_numbers, strict=True))
    return numeric_value(sizes.array([elements[position] for position in range(len(elements))]))


@rule("BroadcastGradientArgs")
def _(call: Call) -> list[Value]:
    axes: Sequence[list[Size | None]] = ([], [])
    is_broadcast = call.inputs[0].known_numbers != call.inputs[1].known_numbers
    for axis, pair in enumerate(_broadcast_pairs(call)):
        for number, dim in enumerate(pair):
            if dim == ONE and is_broadcast:
                axes[number].append(sizes.size(axis))
    return [numeric_value(sizes.array(axis_list)) for axis_list in axes]


@rule("BroadcastArgs")
def _(call: Call) -> Value:
    return numeric_value(sizes.array([right if left == ONE else left for left, right in _broadcast_pairs(call)]))


def _broadcast_pairs(call: Call) -> list[tuple[Size, Size]]:
    """Returns the pairs of dims of two shapes that are broadcast against each other."""
    shapes = [value.known_numbers for value in call.inputs]
    rank = max(map(len, shapes))
    pairs = list(zip(*([ONE] * (rank - len(shape)) + shape for shape in shapes), strict=True))
    require(all(left == right or ONE in (left, right) for left, right in pairs), "dims cannot be compared")
    return pairs


_UNKNOWN = Value(ALL_ROWS)


def _list(element: Value, *lengths: Value, dims: Dims | None = None) -> Value:
    """Returns a list of tensors, whose label is known if all `lengths` are replicated."""
    is_known = all(length.is_replicated for length in lengths)
    return Value(REPLICATED, dims, element=element) if is_known else _UNKNOWN


def _element(value: Value) -> Value:
    return value.element or _UNKNOWN


def _write(call: Call, element: Value) -> Value:
    """Returns the list after a tensor is written to it."""
    if call.inputs[0].element is None:
        return _UNKNOWN
    plain = dataclasses.replace(element, label=without_base(element.label), variable=None)
    written = join_values([call.inputs[0].element, plain])
    return _list(written, dims=call.inputs[0].dims)


@rule("TensorListReserve", "EmptyTensorList")
def _(call: Call) -> Value:
    if call.kind == "EmptyTensorList":
        return _list(UNWRITTEN)
    length = call.inputs[1]
    return _list(UNWRITTEN, length, dims=None if length.numbers is None else (length.numbers.item(),))


@rule("TensorListSetItem")
def _(call: Call) -> Value:
    return _write(call, call.inputs[2] if call.inputs[1].is_replicated else _UNKNOWN)


@rule("TensorListPushBack")
def _(call: Call) -> Value:
    return dataclasses.replace(_write(call, call.inputs[1]), dims=None)


@rule("TensorListGetItem")
def _(call: Call) -> Value:
    return _element(call.inputs[0]) if call.inputs[1].is_replicated else _UNKNOWN


@rule("TensorListPopBack")
def _(call: Call) -> list[Value]:
    return [dataclasses.replace(call.inputs[0], dims=None), _element(call.inputs[0])]


@rule("TensorListLength")
def _(call: Call) -> Value:
    if call.inputs[0].dims is not None:
        return numeric_value(sizes.array(call.inputs[0].dims, ()), ())
    return Value(REPLICATED if call.inputs[0].element is not None else ALL_ROWS)


@rule("TensorListResize")
def _(call: Call) -> Value:
    return _list(_element(call.inputs[0]), call.inputs[1]) if call.inputs[0].element else _UNKNOWN


@rule("TensorListElementShape")
def _(call: Call) -> Value:
    return _UNKNOWN


def _unstack(value: Value) -> Value:
    """Returns the value of each part of a tensor that is split along its first axis."""
    label = value.label
    dims = value.dims[1:] if value.dims is not None else None
    depends_on_rows = isinstance(label, AllRows) or isinstance(label, Rows) and not label.axis
    require(not depends_on_rows, "the length of a list depends on rows")
    return rearrange(value, dims, lambda axis: axis - 1)


@rule("TensorListFromTensor")
def _(call: Call) -> Value:
    tensor = call.inputs[0]
    return _list(_unstack(tensor), dims=tensor.dims[:1] if tensor.dims is not None else None)


@rule("TensorListScatterV2", "TensorListScatter")
def _(call: Call) -> Value:
    tensor, indices, _, *count = call.inputs
    return _list(_unstack(tensor), indices, *count)


@rule("TensorListStack", "TensorListGather")
def _(call: Call) -> Value:
    element = _element(call.inputs[0])
    if call.kind == "TensorListGather" and not call.inputs[1].is_replicated:
        return _UNKNOWN
    if element == UNWRITTEN:
        return UNWRITTEN
    length = call.inputs[0].dims[0] if call.inputs[0].dims is not None and call.kind == "TensorListStack" else None
    dims = None if element.dims is None else (length or symbol(call.operation.name), *element.dims)
    return rearrange(element, dims, lambda axis: axis + 1)
