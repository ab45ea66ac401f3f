"""Propagates labels through the operations of a traced function, including its calls, branches and loops."""

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
_MAX_ITERATIONS = 12


class Interpreter:
    """Labels the tensors of a function's graph."""

    def __init__(self, *, is_one_device: bool = False) -> None:
        self.is_one_device = is_one_device  # whether any dim may depend on the number of rows, as on one device
        self.variables: ChainMap[object, Value] = (
            ChainMap()
        )  # value of each assigned variable, by the key of its resource
        self.types_without_rule: set[str] = set()

    def run(self, graph: Any, inputs: Sequence[Value]) -> list[Value]:
        """Returns the abstract values of the outputs of a `FuncGraph`, given those of its inputs."""
        values = self.values(graph, dict(zip([tensor.ref() for tensor in graph.inputs], inputs, strict=True)))
        return [values[tensor.ref()] for tensor in graph.outputs]

    def values(self, graph: Any, inputs: Mapping[Any, Value]) -> dict[Any, Value]:
        """Returns the abstract value of each tensor of a graph, by reference, given those of its placeholders."""
        values = {reference: self.with_static_shape(reference.deref(), value) for reference, value in inputs.items()}
        declarations_by_name = declarations(graph)
        for operation in topological_order(graph):
            if operation.outputs and operation.outputs[0].ref() in values:
                continue
            call = Call(operation, [values[tensor.ref()] for tensor in operation.inputs], self.variables)
            results = self.results(graph, call)
            if operation.name in declarations_by_name:
                declaration, tensors = declarations_by_name[operation.name]
                declared_inputs = [values[tensor.ref()] for tensor in tensors]
                results = [_with_cause(declaration(*declared_inputs), Call(operation, declared_inputs, self.variables))]
            for tensor, value in zip(operation.outputs, results, strict=True):
                values[tensor.ref()] = _with_cause(self.with_static_shape(tensor, value), call)
        return values

    def with_static_shape(self, tensor: tf.Tensor, value: Value) -> Value:
        """Adds the static dims of a tensor to its value.

        Other dims become symbols that are equal on all replicas, unless the value depends on all rows. Unwritten elements of a
        list are zeros of any shape.
        """
        if tensor.dtype in (tf.variant, tf.resource) or tensor.shape.rank is None:
            return value
        if value.numbers is not None and value.numbers.ndim == tensor.shape.rank:
            return dataclasses.replace(value, dims=tuple(size(length) for length in value.numbers.shape))
        old_dims = value.dims if value.dims is not None and len(value.dims) == tensor.shape.rank else None
        row_axis = value.label.axis if isinstance(value.label, Rows) else None
        count_axes = (axis for axis, dim in enumerate(old_dims or ()) if dim is not None and dim.power)
        if not self.is_one_device and any(axis != row_axis for axis in count_axes):
            value = dataclasses.replace(value, label=ALL_ROWS)  # another dim depends on the number of rows
        dims: list[Any] = []
        for axis, static in enumerate(tensor.shape):
            if isinstance(value.label, Rows) and axis == row_axis:
                if static is not None:
                    return Value(ALL_ROWS)  # the trace depends on a fixed number of rows
                dims.append(value.label.size)
            elif static is not None:
                dims.append(size(static))
            elif old_dims is not None and old_dims[axis] is not None:
                dims.append(old_dims[axis])
            else:
                dims.append(None if isinstance(value.label, AllRows) or value == UNWRITTEN else symbol(tensor.name))
        return dataclasses.replace(value, dims=tuple(dims))

    def results(self, graph: Any, call: Call) -> Sequence[Value]:
        """Returns a value for each output of an operation."""
        try:
            results = self._interpret(graph, call)
            if isinstance(results, Sequence) and len(results) != len(call.operation.outputs):
                raise NoRuleError("the graph of the function does not match the function that is called")
        except NoRuleError as error:
            _log.debug("%s: %s", call.operation.name, error)
            results = None
        except Exception:  # a rule that fails must not stop a run
            _log.debug("The rule of %s failed:", call.operation.name, exc_info=True)
            results = None
        if results is None:
            for tensor, value in zip(call.operation.inputs, call.inputs, strict=True):
                if value.variable is not None and tensor.dtype == tf.resource:  # it may have assigned the variable
                    self.variables[value.variable] = Value(AllRows(call.operation))
            results = [Value(ALL_ROWS)] * len(call.operation.outputs)
        results = [results] * len(call.operation.outputs) if isinstance(results, Value) else results
        if call.is_replicated and not call.operation.op_def.is_stateful:
            results = [_replicated_if_unknown(value) for value in results]
        return results

    def _interpret(self, graph: Any, call: Call) -> Value | Sequence[Value] | None:
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
            self.types_without_rule.add(kind)
        return None

    def _run_isolated(self, graph: Any, inputs: Sequence[Value]) -> tuple[list[Value], dict[object, Value]]:
        """Returns the outputs of a graph and the variables that it assigns, without assigning them."""
        outer = self.variables
        self.variables = outer.new_child()
        try:
            outputs = self.run(graph, inputs)
            return outputs, dict(self.variables.maps[0])
        finally:
            self.variables = outer

    def _join_assignments(
        self, assignments: Sequence[dict[object, Value]], call: Call, *, is_known: bool
    ) -> dict[object, Value]:
        """Returns the variables after one of several runs; `is_known` is True if all replicas execute the same run."""
        values = {}
        for key in set().union(*assignments):
            dims = next(assignment[key].dims for assignment in assignments if key in assignment)
            old_value = self.variables.get(key) or Value(REPLICATED, dims, variable=key)
            values[key] = (
                join_values([assignment.get(key, old_value) for assignment in assignments])
                if is_known
                else Value(AllRows(call.operation), dims)
            )
        return values

    def _branches(self, graph: Any, call: Call) -> Sequence[Value]:
        condition, *inputs = call.inputs
        names = ("then_branch", "else_branch")
        attributes = call.attribute("branches") if call.kind.endswith("Case") else map(call.attribute, names)
        runs = [self._run_isolated(_function(graph, attribute.name), inputs) for attribute in attributes]
        outputs, assignments = zip(*runs, strict=True)
        self.variables.update(self._join_assignments(assignments, call, is_known=condition.is_replicated))
        if condition.is_replicated:
            return [join_values(values) for values in zip(*outputs, strict=True)]
        return [Value(ALL_ROWS)] * len(call.operation.outputs)

    def _loop(self, graph: Any, call: Call) -> Sequence[Value]:
        """Interprets the body until no value changes; results are known if the condition is equal on all replicas."""
        body, condition = (_function(graph, call.attribute(name).name) for name in ("body", "cond"))
        values = list(call.inputs)
        outer = self.variables
        self.variables = outer.new_child()
        try:
            for _ in range(_MAX_ITERATIONS):
                old_variables = dict(self.variables.maps[0])
                (decision,), condition_assignments = self._run_isolated(condition, values)
                self.variables.update(self._join_assignments([{}, condition_assignments], call, is_known=True))
                results, body_assignments = self._run_isolated(body, values)
                self.variables.update(self._join_assignments([{}, body_assignments], call, is_known=True))
                next_values = [join_values([old, new]) for old, new in zip(values, results, strict=True)]
                if next_values == values and dict(self.variables.maps[0]) == old_variables:
                    break
                values = next_values
            else:
                decision = Value(ALL_ROWS)
            assignments = dict(self.variables.maps[0])
        finally:
            self.variables = outer
        self.variables.update(self._join_assignments([assignments], call, is_known=decision.is_replicated))
        return values if decision.is_replicated else [Value(ALL_ROWS)] * len(values)


def _replicated_if_unknown(value: Value) -> Value:
    is_unknown = isinstance(value.label, AllRows) and value.numbers is None
    return dataclasses.replace(value, label=REPLICATED) if is_unknown else value


def _with_cause(value: Value, call: Call) -> Value:
    """Sets the cause of a value that depends on all rows: the first operation whose result does."""
    if not isinstance(value.label, AllRows) or value.label.cause is not None or value.numbers is not None:
        return value
    labels = [input_value.label for input_value in call.inputs]
    causes = (label.cause for label in labels if isinstance(label, AllRows) and label.cause is not None)
    return dataclasses.replace(value, label=AllRows(next(causes, call.operation)))


def _function(graph: Any, name: str) -> Any:
    function = graph._get_function(name)
    if function is None or getattr(function, "graph", None) is None:
        raise NoRuleError(f"the graph of {name} is unknown")
    return function.graph


def topological_order(graph: Any) -> list[tf.Operation]:
    """Returns a graph's operations, each after its inputs and control inputs.

    The order of creation is not topological: a loop's gradient adds accumulators to the loop after its creation.
    """
    visited, order = set(), []
    for root in graph.get_operations():
        stack = [(root, False)]
        while stack:
            operation, has_inputs = stack.pop()
            if has_inputs:
                order.append(operation)
            elif operation.name not in visited:
                visited.add(operation.name)
                stack.append((operation, True))
                predecessors = [*operation.control_inputs, *(tensor.op for tensor in operation.inputs)]
                stack.extend((predecessor, False) for predecessor in predecessors if predecessor.name not in visited)
    return order
