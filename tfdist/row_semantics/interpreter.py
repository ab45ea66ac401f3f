"""Propagates labels through a traced function, operation by operation, and through its calls, branches and loops."""

import dataclasses
import logging
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.row_semantics.declarations import declarations
from tfdist.row_semantics.rules import RULES, Call
from tfdist.row_semantics.sizes import size, symbol
from tfdist.row_semantics.values import ALL_ROWS, REPLICATED, UNWRITTEN, AllRows, NoRuleError, Rows, Value, join_values

_log = logging.getLogger(__name__)
_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
_LOOPS = ("While", "StatelessWhile")
_MOST_ITERATIONS = 12


class Interpreter:
    """Labels the tensors of a function's graph.

    Attributes:
      variables: what is known of the value of each variable, by the key of its resource; missing ones are unchanged.
      without_rule: types of operations that were met without a rule.
      is_one_device: whether the values are those of one device: their dims may depend on the number of rows.
    """

    def __init__(self, *, is_one_device: bool = False) -> None:
        self.is_one_device = is_one_device
        self.variables: ChainMap[object, Value] = ChainMap()
        self.without_rule: set[str] = set()

    def run(self, graph: Any, inputs: Sequence[Value]) -> list[Value]:
        """Returns what is known of a graph's outputs.

        Args:
          graph: a `FuncGraph`.
          inputs: a value for each of `graph.inputs`.
        """
        values = self.values(graph, dict(zip([tensor.ref() for tensor in graph.inputs], inputs, strict=True)))
        return [values[tensor.ref()] for tensor in graph.outputs]

    def values(self, graph: Any, inputs: Mapping[Any, Value]) -> dict[Any, Value]:
        """Returns what is known of each tensor of a graph, by its reference, given its placeholders."""
        values = {reference: self.with_static_shape(reference.deref(), value) for reference, value in inputs.items()}
        declared = declarations(graph)
        for operation in in_order(graph):
            if operation.outputs and operation.outputs[0].ref() in values:
                continue
            call = Call(operation, [values[tensor.ref()] for tensor in operation.inputs], self.variables)
            results = self.results(graph, call)
            if operation.name in declared:
                declaration, tensors = declared[operation.name]
                declared_inputs = [values[tensor.ref()] for tensor in tensors]
                results = [_with_cause(declaration(*declared_inputs), Call(operation, declared_inputs, self.variables))]
            for tensor, value in zip(operation.outputs, results, strict=True):
                values[tensor.ref()] = _with_cause(self.with_static_shape(tensor, value), call)
        return values

    def with_static_shape(self, tensor: tf.Tensor, value: Value) -> Value:
        """Adds the dims that TensorFlow knows; other dims of what does not depend on all rows are the same everywhere.

        A list's items that are not written yet are zeros of any shape.
        """
        if tensor.dtype in (tf.variant, tf.resource) or tensor.shape.rank is None:
            return value
        if value.numbers is not None and value.numbers.ndim == tensor.shape.rank:
            return dataclasses.replace(value, dims=tuple(size(length) for length in value.numbers.shape))
        known = value.dims if value.dims is not None and len(value.dims) == tensor.shape.rank else None
        own = value.label.axis if isinstance(value.label, Rows) else None
        counted = (axis for axis, dim in enumerate(known or ()) if dim is not None and dim.power)
        if not self.is_one_device and any(axis != own for axis in counted):
            value = dataclasses.replace(value, label=ALL_ROWS)  # another dim depends on the number of rows
        dims: list[Any] = []
        for axis, static in enumerate(tensor.shape):
            if isinstance(value.label, Rows) and axis == own:
                if static is not None:
                    return Value(ALL_ROWS)  # a known number of rows is part of what was traced
                dims.append(value.label.size)
            elif static is not None:
                dims.append(size(static))
            elif known is not None and known[axis] is not None:
                dims.append(known[axis])
            else:
                dims.append(None if isinstance(value.label, AllRows) or value == UNWRITTEN else symbol(tensor.name))
        return dataclasses.replace(value, dims=tuple(dims))

    def results(self, graph: Any, call: Call) -> Sequence[Value]:
        """Returns a value for each output of an operation."""
        try:
            results = self._called(graph, call)
            if isinstance(results, Sequence) and len(results) != len(call.operation.outputs):
                raise NoRuleError("the graph of the function is another one than that which is called")
        except NoRuleError as error:
            _log.debug("%s: %s", call.operation.name, error)
            results = None
        except Exception:  # a rule that fails must not stop a run: what it cannot tell needs all rows
            _log.debug("The rule of %s failed:", call.operation.name, exc_info=True)
            results = None
        if results is None:
            self._forget_variables(call)
            results = [Value(ALL_ROWS)] * len(call.operation.outputs)
        results = [results] * len(call.operation.outputs) if isinstance(results, Value) else results
        if call.is_replicated and not call.operation.op_def.is_stateful:
            results = [_replicated_at_least(value) for value in results]
        return [_with_cause(value, call) for value in results]

    def _called(self, graph: Any, call: Call) -> Value | Sequence[Value] | None:
        kind = call.kind
        if kind in _CALLS:
            return self.run(_function(graph, call.attribute("f").name), call.inputs)
        if kind in _BRANCHES:
            return self._branches(graph, call)
        if kind in _LOOPS:
            return self._loop(graph, call)
        if rule := RULES.get(kind):
            return rule(call)
        if graph._is_function(kind):  # a function called by its name
            return self.run(_function(graph, kind), call.inputs)
        if call.operation.op_def.is_stateful or not call.is_replicated:
            self.without_rule.add(kind)
        return None

    def _forget_variables(self, call: Call) -> None:
        """An unknown operation may have assigned each variable that it gets."""
        for tensor, value in zip(call.operation.inputs, call.inputs, strict=True):
            if value.variable is not None and tensor.dtype == tf.resource:
                self.variables[value.variable] = Value(AllRows(call.operation))

    def _run_apart(self, graph: Any, inputs: Sequence[Value]) -> tuple[list[Value], dict[object, Value]]:
        """Runs a graph, and returns its outputs and the variables that it assigns, without assigning them."""
        outer = self.variables
        self.variables = outer.new_child()
        try:
            outputs = self.run(graph, inputs)
            return outputs, dict(self.variables.maps[0])
        finally:
            self.variables = outer

    def _assigned(self, assigned: Sequence[dict[object, Value]], call: Call, *, is_known: bool) -> dict[object, Value]:
        """Returns the variables after one of several runs; it must be known, on all replicas equally, which one it was."""
        joined = {}
        for key in set().union(*assigned):
            dims = next(each[key].dims for each in assigned if key in each)
            before = self.variables.get(key) or Value(REPLICATED, dims, variable=key)
            joined[key] = (
                join_values([each.get(key, before) for each in assigned])
                if is_known
                else Value(AllRows(call.operation), dims)
            )
        return joined

    def _branches(self, graph: Any, call: Call) -> Sequence[Value]:
        condition, *inputs = call.inputs
        names = ("then_branch", "else_branch")
        attributes = call.attribute("branches") if call.kind.endswith("Case") else map(call.attribute, names)
        runs = [self._run_apart(_function(graph, attribute.name), inputs) for attribute in attributes]
        outputs, assigned = zip(*runs, strict=True)
        self.variables.update(self._assigned(assigned, call, is_known=condition.is_replicated))
        if condition.is_replicated:
            return [join_values(values) for values in zip(*outputs, strict=True)]
        return [Value(ALL_ROWS)] * len(call.operation.outputs)

    def _loop(self, graph: Any, call: Call) -> Sequence[Value]:
        """Repeats the body until nothing that is known changes; the condition must be the same on all replicas."""
        body, condition = (_function(graph, call.attribute(name).name) for name in ("body", "cond"))
        current = list(call.inputs)
        outer = self.variables
        self.variables = outer.new_child()
        try:
            for _ in range(_MOST_ITERATIONS):
                before = dict(self.variables.maps[0])
                (decision,), of_condition = self._run_apart(condition, current)
                self.variables.update(self._assigned([{}, of_condition], call, is_known=True))
                results, of_body = self._run_apart(body, current)
                self.variables.update(self._assigned([{}, of_body], call, is_known=True))
                joined = [join_values([old, new]) for old, new in zip(current, results, strict=True)]
                if joined == current and dict(self.variables.maps[0]) == before:
                    break
                current = joined
            else:
                decision = Value(ALL_ROWS)
            assigned = dict(self.variables.maps[0])
        finally:
            self.variables = outer
        self.variables.update(self._assigned([assigned], call, is_known=decision.is_replicated))
        return current if decision.is_replicated else [Value(ALL_ROWS)] * len(current)


def _replicated_at_least(value: Value) -> Value:
    """Returns what is known of a function of replicated values."""
    is_unknown = isinstance(value.label, AllRows) and value.numbers is None
    return dataclasses.replace(value, label=REPLICATED) if is_unknown else value


def _with_cause(value: Value, call: Call) -> Value:
    """Names the operation if it is the first one whose result depends on all rows."""
    if not isinstance(value.label, AllRows) or value.numbers is not None:
        return value
    if value.label.cause is not None:
        return value
    earlier = next(
        (each.label.cause for each in call.inputs if isinstance(each.label, AllRows) and each.label.cause is not None),
        None,
    )
    return dataclasses.replace(value, label=AllRows(earlier or call.operation))


def _function(graph: Any, name: str) -> Any:
    """Returns the graph of a function by its name."""
    function = graph._get_function(name)
    if function is None or getattr(function, "graph", None) is None:
        raise NoRuleError(f"the graph of {name} is not known")
    return function.graph


def in_order(graph: Any) -> list[tf.Operation]:
    """Returns a graph's operations so that each follows its inputs and what it must wait for.

    They are not created in this order: the accumulators of a loop's gradient are added to the loop later.
    """
    seen, order = set(), []
    for last in graph.get_operations():
        stack = [(last, False)]
        while stack:
            operation, has_inputs = stack.pop()
            if has_inputs:
                order.append(operation)
            elif operation.name not in seen:
                seen.add(operation.name)
                stack.append((operation, True))
                before = [*operation.control_inputs, *(tensor.op for tensor in operation.inputs)]
                stack.extend((each, False) for each in before if each.name not in seen)
    return order
