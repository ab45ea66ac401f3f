"""Variables and tables."""

import dataclasses

from tfdist.row_semantics import sizes
from tfdist.row_semantics.labels import ALL_ROWS, REPLICATED, Label, Partial, ReplicatedPlusSum, Rows, total
from tfdist.row_semantics.rules.elementwise import linear, pointwise
from tfdist.row_semantics.rules.indexing import scattered
from tfdist.row_semantics.rules.registry import Call, rule
from tfdist.row_semantics.values import Value, of_numbers


@rule("ReadVariableOp")
def _(call: Call) -> Value:
    return call.variable(0)


@rule("VariableShape")
def _(call: Call) -> Value:
    shape = call.variable(0).dims
    return Value(REPLICATED) if shape is None else of_numbers(sizes.array(shape))


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
    added = dataclasses.replace(change, label=linear(change))
    call.assign(0, Value(_increased(old, added.label), old.dims))
    return []


def _increased(old: Value, change: Label) -> Label:
    """Returns the label of a variable's value plus a change."""
    if isinstance(old.label, Rows) or isinstance(change, Rows):
        return ALL_ROWS
    label = total([old.label, change])
    if isinstance(label, ReplicatedPlusSum) and isinstance(change, Partial):
        base = old.label.variable if isinstance(old.label, ReplicatedPlusSum) else old.variable
        return dataclasses.replace(label, variable=base)
    return label


@rule("ResourceScatterAdd", "ResourceScatterSub", "ResourceScatterNdAdd")
def _(call: Call) -> list[Value]:
    old = call.variable(0)
    indices, updates = call.inputs[1:]
    call.assign(0, Value(_increased(old, scattered(updates, indices, None)), old.dims))
    return []


@rule("LookupTableFindV2")
def _(call: Call) -> Value:
    _, keys, default = call.inputs
    return Value(pointwise([keys]) if default.is_replicated else ALL_ROWS, keys.dims)


@rule("LookupTableSizeV2")
def _(call: Call) -> Value:
    return Value(REPLICATED)
