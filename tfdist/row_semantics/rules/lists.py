"""Lists of tensors, in which loops accumulate. The only dim of a list is its length."""

import dataclasses

from tfdist.row_semantics import sizes
from tfdist.row_semantics.labels import ALL_ROWS, REPLICATED, Rows
from tfdist.row_semantics.rules.registry import Call, rule
from tfdist.row_semantics.sizes import symbol
from tfdist.row_semantics.values import UNWRITTEN, Dims, Value, join_values, of_numbers

_UNKNOWN = Value(ALL_ROWS)


def _list(element: Value, dims: Dims | None = None) -> Value:
    return Value(REPLICATED, dims, element=element)


def _element(value: Value) -> Value:
    return value.element or _UNKNOWN


def _written(call: Call, element: Value) -> Value:
    """Returns the list into which a tensor is written."""
    return _list(
        join_values([_element(call.inputs[0]), dataclasses.replace(element, variable=None)]), call.inputs[0].dims
    )


@rule("TensorListReserve", "EmptyTensorList")
def _(call: Call) -> Value:
    length = call.inputs[1].numbers if call.kind == "TensorListReserve" else None
    return _list(UNWRITTEN, None if length is None else (length.item(),))


@rule("TensorListSetItem")
def _(call: Call) -> Value:
    return _written(call, call.inputs[2]) if call.inputs[1].is_replicated else _list(_UNKNOWN)


@rule("TensorListPushBack")
def _(call: Call) -> Value:
    return dataclasses.replace(_written(call, call.inputs[1]), dims=None)


@rule("TensorListGetItem")
def _(call: Call) -> Value:
    return _element(call.inputs[0]) if call.inputs[1].is_replicated else _UNKNOWN


@rule("TensorListPopBack")
def _(call: Call) -> list[Value]:
    return [dataclasses.replace(call.inputs[0], dims=None), _element(call.inputs[0])]


@rule("TensorListLength")
def _(call: Call) -> Value:
    if call.inputs[0].dims is not None:
        return of_numbers(sizes.array(call.inputs[0].dims, ()), ())
    return Value(REPLICATED if call.inputs[0].element is not None else ALL_ROWS)


@rule("TensorListResize")
def _(call: Call) -> Value:
    return dataclasses.replace(call.inputs[0], dims=None) if call.inputs[1].is_replicated else _list(_UNKNOWN)


@rule("TensorListElementShape")
def _(call: Call) -> Value:
    return _UNKNOWN


def _taken_apart(value: Value) -> Value:
    """Returns what is known of the parts of a tensor along its first axis."""
    label = value.label
    dims = value.dims[1:] if value.dims is not None else None
    if isinstance(label, Rows):
        return Value(dataclasses.replace(label, axis=label.axis - 1), dims) if label.axis else _UNKNOWN
    return Value(label, dims)


@rule("TensorListFromTensor")
def _(call: Call) -> Value:
    tensor = call.inputs[0]
    return _list(_taken_apart(tensor), tensor.dims[:1] if tensor.dims is not None else None)


@rule("TensorListScatterV2", "TensorListScatter")
def _(call: Call) -> Value:
    tensor, indices = call.inputs[:2]
    return _list(_taken_apart(tensor) if indices.is_replicated else _UNKNOWN)


@rule("TensorListStack", "TensorListGather")
def _(call: Call) -> Value:
    element = _element(call.inputs[0])
    if call.kind == "TensorListGather" and not call.inputs[1].is_replicated:
        return _UNKNOWN
    label = element.label
    dims: Dims | None = None
    if element.dims is not None:
        length = call.inputs[0].dims[0] if call.inputs[0].dims is not None and call.kind == "TensorListStack" else None
        dims = (length or symbol(f"{call.operation.name}:length"), *element.dims)
    if isinstance(label, Rows):
        return Value(dataclasses.replace(label, axis=label.axis + 1), dims)
    return Value(label, dims)
