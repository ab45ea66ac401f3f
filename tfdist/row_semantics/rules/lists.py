"""Lists of tensors, in which loops accumulate. The only dim of a list is its length."""

import dataclasses

from tfdist.row_semantics import sizes
from tfdist.row_semantics.labels import ALL_ROWS, REPLICATED, AllRows, Rows, without_base
from tfdist.row_semantics.rules.registry import Call, rule
from tfdist.row_semantics.sizes import symbol
from tfdist.row_semantics.values import UNWRITTEN, Dims, NoRuleError, Value, join_values, of_numbers

_UNKNOWN = Value(ALL_ROWS)


def _list(element: Value, *lengths: Value, dims: Dims | None = None) -> Value:
    """Returns a list of tensors, of the same length on all replicas if these values are."""
    is_known = all(length.is_replicated for length in lengths)
    return Value(REPLICATED, dims, element=element) if is_known else _UNKNOWN


def _element(value: Value) -> Value:
    return value.element or _UNKNOWN


def _written(call: Call, element: Value) -> Value:
    """Returns the list into which a tensor is written."""
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
    return _written(call, call.inputs[2] if call.inputs[1].is_replicated else _UNKNOWN)


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
    return _list(_element(call.inputs[0]), call.inputs[1]) if call.inputs[0].element else _UNKNOWN


@rule("TensorListElementShape")
def _(call: Call) -> Value:
    return _UNKNOWN


def _unstacked(value: Value) -> Value:
    """Returns what is known of the parts of a tensor along its first axis."""
    label = value.label
    dims = value.dims[1:] if value.dims is not None else None
    if isinstance(label, AllRows) or isinstance(label, Rows) and not label.axis:
        raise NoRuleError("the length of a list depends on rows")
    label = dataclasses.replace(label, axis=label.axis - 1) if isinstance(label, Rows) else without_base(label)
    return Value(label, dims)


@rule("TensorListFromTensor")
def _(call: Call) -> Value:
    tensor = call.inputs[0]
    return _list(_unstacked(tensor), dims=tensor.dims[:1] if tensor.dims is not None else None)


@rule("TensorListScatterV2", "TensorListScatter")
def _(call: Call) -> Value:
    tensor, indices, _, *count = call.inputs
    return _list(_unstacked(tensor), indices, *count)


@rule("TensorListStack", "TensorListGather")
def _(call: Call) -> Value:
    element = _element(call.inputs[0])
    if call.kind == "TensorListGather" and not call.inputs[1].is_replicated:
        return _UNKNOWN
    label = element.label
    if element == UNWRITTEN:
        return UNWRITTEN
    length = call.inputs[0].dims[0] if call.inputs[0].dims is not None and call.kind == "TensorListStack" else None
    dims = None if element.dims is None else (length or symbol(call.operation.name), *element.dims)
    if isinstance(label, Rows):
        return Value(dataclasses.replace(label, axis=label.axis + 1), dims)
    return Value(label, dims)
