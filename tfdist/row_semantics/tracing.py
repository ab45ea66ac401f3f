"""Traces the code of one replica with a symbolic number of rows, and labels its results and assigned values."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import OneReplica, Op, RecordedCall
from tfdist.row_semantics.declarations import GRAPH, all_rows_of, declare, declare_sum
from tfdist.row_semantics.interpreter import Interpreter
from tfdist.row_semantics.sizes import COUNT, symbol
from tfdist.row_semantics.values import ALL_ROWS, REPLICATED, AllRows, Label, ReplicatedPlusSum, Rows, Value

_GRADIENT_PREFIX = "gradient_tape/"  # in the names of operations that a tape creates
# Raised by code that cannot be traced with an unknown number of rows.
FAILURES = (tf.errors.OpError, ValueError, TypeError, AttributeError)


class LabelledCollectives(OneReplica):
    """Collectives for tracing that do not communicate, declare the labels of their results, and record `calls`."""

    def __init__(self, weight: tf.Tensor | None, *, communicates: bool = True):
        # `weight` is the scalar weight of the replica's loss, applied after differentiation; None for 1. `communicates` is
        # False for the micro-steps of one replica, which have no collectives.
        self._weight, self._communicates = weight, communicates
        self.calls: list[RecordedCall] = []

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""
        self._record("all_reduce", name, tensors)
        if not self._communicates:
            return list(tensors)
        return [declare_sum(tensor) if op == "sum" else _declare_all_rows(tensor) for tensor in tensors]

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class."""
        self._record("all_gather", name, tensors)
        if not self._communicates:
            return list(tensors)
        return [all_rows_of(tensor, name, self._weight) for tensor in tensors]

    def all_rows_of(self, rows: tf.Tensor, name: str) -> tf.Tensor:
        """See base class."""
        [all_rows] = self.all_gather([rows], name=name)
        return all_rows

    def _record(self, operation: str, name: str, tensors: Sequence[tf.Tensor]) -> None:
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        self.calls.append(RecordedCall(operation, name, tuple(tensor.dtype for tensor in tensors), shapes))


def _declare_all_rows(tensor: tf.Tensor) -> tf.Tensor:
    return declare(tensor, lambda value: Value(REPLICATED if value.is_replicated else ALL_ROWS, value.dims), [tensor])


class _Scope(keras.StatelessScope):
    """Holds the values of variables, except for differentiated variables, which a tape identifies by their resources.

    Values assigned to differentiated variables must be replicated, like the old values, which reads still return.
    """

    def __init__(self, state_values: Sequence[tuple[keras.Variable, tf.Tensor]]):
        super().__init__(state_values, collect_losses=True)
        self._held_ids = {id(variable) for variable, _ in state_values}
        self._assigned: dict[int, Any] = {}
        self._updated_ids: set[int] = set()

    def get_current_value(self, variable: keras.Variable) -> Any:
        """See base class. A value read after an assignment has no gradient, as if it were read from the variable."""
        value = super().get_current_value(variable)
        return tf.stop_gradient(value) if id(variable) in self._updated_ids else value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        if id(update[0]) in self._held_ids:
            super().add_update(update)
            self._updated_ids.add(id(update[0]))
        else:
            self._assigned[id(update[0])] = update[1]

    def assigns_others(self, variables: Sequence[keras.Variable]) -> bool:
        """Returns whether variables other than these have been assigned."""
        return not self._assigned.keys() <= {id(variable) for variable in variables}

    def value_of(self, variable: keras.Variable) -> Any:
        """Returns the last value of a variable; None if it has not been assigned."""
        return self._assigned.get(id(variable), super().get_current_value(variable))


class Labels(NamedTuple):
    """The labels of one call of a function."""

    results: Any  # labels, in the structure of the function's result; None for leaves that are not tensors
    # For each variable, the label of its final value; None if it has not been assigned. A `ReplicatedPlusSum` means that a
    # sum was added to the variable's initial value.
    variables: list[Label | None]
    are_increments: list[
        bool
    ]  # for each variable, whether all assignments add something independent to its initial value
    is_used: Callable[[keras.Variable], bool]  # returns whether the results depend on a variable's initial value
    tf_variables: list[Label]  # of the values that were assigned to TensorFlow's variables
    types_without_rule: set[str]  # types of operations without a rule


def distinct_variables(*groups: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Returns the distinct variables in several groups of variables."""
    return list({id(variable): variable for group in groups for variable in group}.values())


class Trace(NamedTuple):
    """A function of one replica, traced with symbolic rows and never run."""

    graph: Any
    rows: Any  # placeholders of the batch, in its structure; None for missing parts
    size: tf.Tensor  # placeholder of the size of the global batch, a scalar int32
    initial_values: dict[int, tf.Tensor]  # placeholders of the initial values of state, by id of the variable
    results: Any  # the result of the function
    values: list[Any]  # tensor with the final value of each variable; None if it has not been assigned
    inputs: dict[Any, Value]  # abstract value of each placeholder, by reference
    assigns_others: bool  # whether variables other than the traced ones have been assigned

    def assignments(self, variables: Sequence[keras.Variable]) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns the traced variables that have been assigned, with their final values."""
        pairs = zip(variables, self.values, strict=True)
        return [(v, value) for v, value in pairs if value is not None and value is not self.initial_values.get(id(v))]


def trace_function(
    function: Callable[..., Any], batch: Any, variables: Sequence[keras.Variable], state: Sequence[keras.Variable]
) -> Trace:
    """Traces a function of a batch without running it; see `labels_of` for the arguments."""
    with keras_internals.symbolic_graph(GRAPH) as graph:
        rows = tf.nest.map_structure(lambda spec: None if spec is None else _placeholder(spec), batch)
        size = tf.compat.v1.placeholder(tf.int32, [])
        state_values = [(variable, tf.compat.v1.placeholder(variable.dtype, variable.shape)) for variable in state]
        with _Scope(state_values) as scope:
            results = function(rows, size)
            values = [scope.value_of(variable) for variable in variables]
            assigns_others = scope.assigns_others(variables)
    inputs = {size.ref(): Value(REPLICATED)}
    for leaf in tf.nest.flatten(rows):
        inputs |= _batch_values(leaf)
    inputs |= {placeholder.ref(): Value(REPLICATED, variable=id(variable)) for variable, placeholder in state_values}
    for outside, inside in graph.captures:
        inputs[inside.ref()] = Value(REPLICATED, variable=id(outside) if inside.dtype == tf.resource else None)
    initial_values = {id(variable): placeholder for variable, placeholder in state_values}
    return Trace(graph, rows, size, initial_values, results, values, inputs, assigns_others)


def labels_of(
    function: Callable[..., Any], batch: Any, variables: Sequence[keras.Variable], state: Sequence[keras.Variable]
) -> Labels:
    """Traces a function of a batch without running it, and labels its results.

    Args:
      function: takes the batch and the size of the global batch, a scalar int32.
      batch: structure of `tf.TensorSpec` [rows, ...], with None for missing parts; the number of rows is ignored.
      variables: variables that the function may assign.
      state: the variables that are not differentiated; others are differentiated by the tapes of the function.
    """
    trace = trace_function(function, batch, variables, state)
    interpreter = Interpreter()
    tensor_values = interpreter.values(trace.graph, trace.inputs)
    results, originals = trace.results, trace.initial_values
    assigned = {id(variable): value for variable, value in trace.assignments(variables)}

    def assigned_label(variable: keras.Variable) -> Label | None:
        if id(variable) not in assigned:
            return None
        label = _value_of(tensor_values, assigned[id(variable)]).known_label
        is_sum_with_other = isinstance(label, ReplicatedPlusSum) and label.variable != id(variable)
        return ALL_ROWS if is_sum_with_other else label

    def is_increment(variable: keras.Variable) -> bool:
        value, original = assigned.get(id(variable)), originals.get(id(variable))
        return value is None or (original is not None and _adds_to(value, original))

    return Labels(
        tf.nest.map_structure(lambda x: _label(tensor_values, x) if isinstance(x, tf.Tensor) else None, results),
        list(map(assigned_label, variables)),
        list(map(is_increment, variables)),
        lambda variable: keras_internals.is_computed_from(results, {id(originals.get(id(variable)))}),
        [value.known_label for value in interpreter.variables.values()],
        interpreter.types_without_rule,
    )


def _adds_to(value: tf.Tensor, original: tf.Tensor) -> bool:
    """Returns whether `value` is `original` plus something that does not depend on `original`."""
    if value is original:
        return True
    if value.op.type not in ("AddV2", "Add", "Sub", "Identity", "StopGradient", "Cast", "TensorScatterAdd"):
        return False
    operands = list(value.op.inputs)
    candidates = operands if value.op.type in ("AddV2", "Add") else operands[:1]
    number = next((number for number, x in enumerate(candidates) if _adds_to(x, original)), None)
    return number is not None and not keras_internals.is_computed_from(
        operands[:number] + operands[number + 1 :], {id(original)}
    )


def _placeholder(spec: Any) -> Any:
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.compat.v1.ragged.placeholder(spec.dtype, spec.ragged_rank, spec.shape[spec.ragged_rank + 1 :])
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.compat.v1.sparse_placeholder(spec.dtype, [None, *spec.shape[1:]])
    return tf.compat.v1.placeholder(spec.dtype, [None, *spec.shape[1:]] if spec.shape.rank else spec.shape)


def _batch_values(leaf: Any) -> dict[Any, Value]:
    """Returns the abstract values of the placeholders of a part of a batch; ragged and sparse tensors have no rules."""
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
        parts = tf.nest.flatten(leaf, expand_composites=True)
        return {part.ref(): Value(ALL_ROWS) for part in parts if part is not None}
    other_dims = [symbol(leaf.name, is_positive=True) for _ in leaf.shape[1:]]
    return {leaf.ref(): Value(Rows(0, COUNT), (COUNT, *other_dims))}


def _value_of(tensor_values: dict[Any, Value], tensor: tf.Tensor) -> Value:
    """Returns the abstract value of a tensor; it is unknown for a tensor of an inner function."""
    return tensor_values.get(tensor.ref(), Value(ALL_ROWS))


def _label(tensor_values: dict[Any, Value], tensor: tf.Tensor) -> Label:
    """Returns the label of a result; for a gradient, the reported cause is in the forward pass, if a cause is found there."""
    label = _value_of(tensor_values, tensor).known_label
    cause = label.cause if isinstance(label, AllRows) else None
    if cause is None or not cause.name.startswith(_GRADIENT_PREFIX):
        return label
    # The name of an operation may be a scope of the operations of its gradient.
    parts = cause.name.removeprefix(_GRADIENT_PREFIX).split("/")
    for count in range(len(parts), 0, -1):
        with contextlib.suppress(KeyError):
            return AllRows(tensor.graph.get_operation_by_name("/".join(parts[:count])))
    stack, visited = [cause], {cause.name}
    while stack:
        operation = stack.pop()
        labels = [tensor_values[output.ref()].label for output in operation.outputs if output.ref() in tensor_values]
        is_cause = any(isinstance(other, AllRows) and other.cause is operation for other in labels)
        if is_cause and not operation.name.startswith(_GRADIENT_PREFIX):
            return AllRows(operation)
        stack.extend(x.op for x in operation.inputs if x.op.name not in visited)
        visited.update(x.op.name for x in operation.inputs)
    return label
