"""Variables and tables."""

import dataclasses

from tfdist.row_semantics import sizes
from tfdist.row_semantics.labels import ALL_ROWS, REPLICATED, Rows
from tfdist.row_semantics.rules.elementwise import increased, pointwise
from tfdist.row_semantics.rules.indexing import scattered
from tfdist.row_semantics.rules.registry import Call, rule
from tfdist.row_semantics.values import NoRuleError, Value, of_numbers


@rule("ReadVariableOp")
def _(call: Call) -> Value:
    return call.variable(0)


@rule("VariableShape")
def _(call: Call) -> Value:
    variable = call.variable(0)
    if variable.dims is None:
        return Value(variable.label if variable.is_replicated else ALL_ROWS)
    return of_numbers(sizes.array(variable.dims))


@rule("VarIsInitializedOp")
def _(call: Call) -> Value:
    return Value(REPLICATED)


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
    call.assign(0, Value(increased(old, change, is_difference=call.kind == "AssignSubVariableOp"), dims))
    return []


@rule("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterNdAdd")
def _(call: Call) -> list[Value]:
    old = call.variable(0)
    indices, updates = call.inputs[1:]
    if isinstance(old.label, Rows):
        raise NoRuleError("the variable has rows")
    change = Value(scattered(updates, indices, of_vectors=call.kind == "ResourceScatterNdAdd"))
    call.assign(0, Value(increased(old, change, is_difference=call.kind == "ResourceScatterSub"), old.dims))
    return []


@rule("LookupTableFindV2")
def _(call: Call) -> Value:
    _, keys, default = call.inputs
    return Value(pointwise([keys]) if default.is_replicated and call.variable(0).is_replicated else ALL_ROWS, keys.dims)


@rule("LookupTableSizeV2")
def _(call: Call) -> Value:
    return Value(REPLICATED if call.variable(0).is_replicated else ALL_ROWS)
