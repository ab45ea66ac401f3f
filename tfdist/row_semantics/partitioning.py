"""Partitions a traced program by rows: replicas compute their own rows and communicate if an operation needs other rows.

As in GSPMD (Xu et al., 2021), each operation is emitted again, and labels determine the conversions of operands: a partial sum
is all-reduced before a nonlinear operation, and rows are gathered before an operation that compares them. A value has two
forms: the local form, which a replica computes from its rows and which a label describes, and the full form, which one device
computes from all rows. Backward passes are part of the traced program.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.collectives.interface import to_transferable
from tfdist.collectives.rows import gather_any_rows
from tfdist.row_semantics.declarations import declarations
from tfdist.row_semantics.interpreter import Interpreter, topological_order
from tfdist.row_semantics.rules import Call
from tfdist.row_semantics.sizes import COUNT, ONE
from tfdist.row_semantics.values import (
    REPLICATED,
    AllRows,
    Partial,
    Replicated,
    ReplicatedPlusSum,
    Rows,
    Value,
    numeric_value,
    sum_power,
)

_LINEAR_TYPES = ("Add", "AddV2", "AddN", "Sub", "Neg", "Identity")
_CHECK_TYPES = ("Assert", "PrintV2")  # operations without outputs that change nothing
_KEY_TYPES = ("FullInt", "GetKey", "GetAlg")  # random operations that draw or return keys, not values
_RANDOM_TYPES = ("Random", "Multinomial", "Binomial", "Poisson", "Gamma", "TruncatedNormal")


class NotPartitionedError(Exception):
    """A program cannot be partitioned; the message is the reason."""


@dataclasses.dataclass
class _Tensor:
    """A tensor of the traced program."""

    source: tf.Tensor
    value: Value  # abstract value of the local form; if there is none, the dims and numbers of the full form
    has_local: bool = True
    local: Any = None  # the local form, once it has been emitted
    full: Any = None  # the full form, once it has been emitted
    is_traced: bool = False  # whether the local form equals the value that the replica computes in the traced program
    is_repeatable: bool = False  # whether the operation can be repeated for the full form without communication
    is_cut: bool = False  # whether the local form is a slice of the full form

    @property
    def is_free(self) -> bool:
        """Whether the full form needs no communication."""
        is_known = self.value.is_replicated or _are_known(self.value.numbers)
        return is_known or self.is_repeatable or self.full is not None

    @property
    def may_be_rows(self) -> bool:
        """Whether it was computed from full forms and may have one element for each row."""
        first = (self.value.dims or (ONE,))[0]
        return (
            isinstance(self.value.label, Replicated) and self.full is not None and (first is None or not first.is_known)
        )

    @property
    def sum_power(self) -> int | None:
        """The power of COUNT if the local form is a partial sum or is scaled by a power of COUNT; otherwise None."""
        label = self.value.label
        return None if isinstance(label, Replicated) and not label.power else sum_power(label)


class PartitionedProgram:
    """A traced program, emitted into the current graph for one replica."""

    def __init__(
        self,
        graph: Any,
        feeds: Mapping[Any, tuple[Value, tf.Tensor]],
        results: Sequence[tf.Tensor],
        rows: tuple[tf.Tensor, tf.Tensor, tf.Tensor],
        collectives: Collectives,
    ):
        """Emits the operations that the results need; raises `NotPartitionedError` if the program cannot be partitioned.

        Args:
          graph: graph of the traced program.
          feeds: for each placeholder, by reference, its abstract value and its tensor in the current graph.
          results: the tensors of the graph to compute.
          rows: three int32 scalars: the number of rows that the replica computes, at least 1; the number of valid rows among
            them; and the number of rows of the whole batch.
          collectives: collectives of the replicas.
        """
        self._graph, self._collectives = graph, collectives
        self._computed_rows, self._valid_rows, self._batch_size = rows
        self._interpreter, self._one_device_interpreter = Interpreter(), Interpreter(is_one_device=True)
        self._one_device_interpreter.variables = self._interpreter.variables
        self._declarations = declarations(graph)
        self._roots = {tensor.ref() for _, inputs in self._declarations.values() for tensor in inputs}
        self._copies: dict[Any, tf.Tensor] = {}
        self._offset: tf.Tensor | None = None
        self._names = itertools.count()
        self._tensors: dict[Any, _Tensor] = {}
        for reference, (value, tensor) in feeds.items():
            value = self._interpreter.with_static_shape(reference.deref(), value)
            self._tensors[reference] = _Tensor(reference.deref(), value, local=tensor, is_traced=True)
        if any(tensor.graph is not graph for tensor in results):
            raise NotPartitionedError("a result is computed inside a condition or a loop")
        changes = [node for node in _all_operations(graph) if node.op_def.is_stateful and not node.outputs]
        if other_types := [node.type for node in changes if node.type not in _CHECK_TYPES]:
            raise NotPartitionedError(f"it changes a variable of TensorFlow by {other_types[0]}")
        checks = [node for node in changes if node.graph is graph]
        conditions = [node.inputs[0] for node in checks if node.type == "Assert"]
        self._needed_outputs = self._find_needed_outputs([*results, *conditions])
        for operation in topological_order(graph):
            if operation.name in self._needed_outputs and operation.outputs[0].ref() not in self._tensors:
                self._emit(operation)
        for operation in checks:
            self._check(operation)

    def full_results(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the results that one device computes, equal on all replicas."""
        return self._full_forms([self._tensors[tensor.ref()] for tensor in tensors])

    def shares(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """Returns floating-point tensors whose sums over replicas are the results of one device."""
        return [
            self._share_of_slices(tensor)
            if isinstance(tensor, tf.IndexedSlices)
            else self._share(self._tensors[tensor.ref()])
            for tensor in tensors
        ]

    def are_full(self, tensors: Sequence[tf.Tensor | tf.IndexedSlices]) -> bool:
        """Returns whether each replica has the results of one device, such as gradients clipped by their global norm."""
        return all(isinstance(x, tf.Tensor) and self._tensors[x.ref()].full is not None for x in tensors)

    def traced_values(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns tensors as the traced program computes them, such as statistics of local rows."""
        return [self._as_traced(tensor) for tensor in tensors]

    def _check(self, operation: tf.Operation) -> None:
        """Emits an assertion or a print; an assertion about all rows checks the full form."""
        inputs = [self._as_traced(tensor) for tensor in operation.inputs]
        if operation.type == "Assert":
            condition = self._tensors[operation.inputs[0].ref()]
            if condition.value.label != Partial("all"):
                [inputs[0]] = self._full_forms([condition])
        self._copy(operation, inputs)

    def _find_needed_outputs(self, results: Sequence[tf.Tensor]) -> dict[str, set[int]]:
        """Returns the indices of the needed outputs of each operation, by name; a declaration needs only its inputs."""
        needed_outputs: dict[str, set[int]] = {}
        stack = list(results)
        while stack:
            tensor = stack.pop()
            operation = tensor.op
            if operation.name not in needed_outputs and tensor.ref() not in self._tensors:
                stack.extend(
                    self._declared_inputs(operation) if operation.name in self._declarations else operation.inputs
                )
            needed_outputs.setdefault(operation.name, set()).add(tensor.value_index)
        return needed_outputs

    def _declared_inputs(self, operation: tf.Operation) -> list[tf.Tensor]:
        """Returns the inputs of a declaration, and the inputs of other declarations from which its tensor is computed."""
        inputs, visited, stack = list(self._declarations[operation.name][1]), set(), list(operation.inputs)
        while stack:
            tensor = stack.pop()
            if tensor.ref() in self._roots or tensor.ref() in self._tensors:
                inputs.append(tensor)
            elif tensor.op.name not in visited:
                visited.add(tensor.op.name)
                stack.extend(tensor.op.inputs)
        return inputs

    def _emit(self, operation: tf.Operation) -> None:
        """Emits an operation with local operands if their labels determine the result's label, or else with full operands."""
        if operation.name in self._declarations:
            return self._emit_declared(operation)
        inputs = [self._tensors[tensor.ref()] for tensor in operation.inputs]
        # Full operands are preferred if they need no communication and differ from local ones.
        prefers_full = any(map(_differs, inputs)) and all(operand.is_free for operand in inputs)
        if not prefers_full and all(operand.has_local for operand in inputs):
            values = self._values(self._interpreter, operation, [operand.value for operand in inputs])
            needed_outputs = self._needed_outputs[operation.name]
            returns_axes = operation.type == "BroadcastGradientArgs"  # the axes differ if the replica has a single row
            is_known = (lambda value: _are_known(value.numbers)) if returns_axes else _is_known
            if all(is_known(value) for number, value in enumerate(values) if number in needed_outputs):
                outputs = self._copy(operation, [self._local(operand) for operand in inputs])
                if returns_axes:
                    pairs = zip(values, outputs, strict=True)
                    outputs = [tf.constant(v.integers, x.dtype) if _are_known(v.numbers) else x for v, x in pairs]
                is_traced = all(operand.is_traced for operand in inputs)
                draws = _is_random(operation, self._graph)
                if draws and any(isinstance(value.label, Replicated) for value in values):
                    raise NotPartitionedError(f"{operation.type} draws a number for all rows")
                is_repeatable = not draws and all(operand.is_free for operand in inputs)
                for source, value, local in zip(operation.outputs, values, outputs, strict=True):
                    self._tensors[source.ref()] = _Tensor(
                        source, value, local=local, is_traced=is_traced, is_repeatable=is_repeatable
                    )
                return None
        return self._emit_full(operation)

    def _emit_declared(self, operation: tf.Operation) -> None:
        declaration, inputs = self._declarations[operation.name]
        operands = [self._tensors[tensor.ref()] for tensor in inputs]
        for operand in operands:
            if operand.has_local:
                self._local(operand)
        if any(not operand.has_local or operand.is_cut or operand.may_be_rows for operand in operands):
            raise NotPartitionedError("a function declared as row-wise depends on values of all rows")
        (source,) = operation.outputs
        value = self._interpreter.with_static_shape(source, declaration(*[operand.value for operand in operands]))
        if not _is_known(value):
            raise NotPartitionedError(f"{operation.name} is computed from all rows")
        self._tensors[source.ref()] = _Tensor(source, value, local=self._as_traced(source), is_traced=True)

    def _emit_full(self, operation: tf.Operation) -> None:
        """Emits an operation with full operands, whose results are full forms."""
        if _is_random(operation, self._graph):
            raise NotPartitionedError(f"{operation.type} draws random numbers for all rows")
        inputs = [self._tensors[tensor.ref()] for tensor in operation.inputs]
        full_inputs = self._full_forms(inputs)
        input_values = [dataclasses.replace(operand.value, label=REPLICATED) for operand in inputs]
        values = self._values(self._one_device_interpreter, operation, input_values)
        for source, value, full in zip(operation.outputs, values, self._copy(operation, full_inputs), strict=True):
            if entry := self._tensors.get(source.ref()):
                entry.full = full
                continue
            replicated = dataclasses.replace(value, label=REPLICATED)
            full_value = self._one_device_interpreter.with_static_shape(source, replicated)
            local = _local_value(full_value)
            self._tensors[source.ref()] = _Tensor(source, local or full_value, local is not None, full=full)

    def _values(self, interpreter: Interpreter, operation: tf.Operation, inputs: Sequence[Value]) -> list[Value]:
        results = interpreter.results(self._graph, Call(operation, inputs, interpreter.variables))
        pairs = zip(operation.outputs, results, strict=True)
        return [interpreter.with_static_shape(tensor, value) for tensor, value in pairs]

    def _copy(self, operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Emits an operation with other operands."""
        graph = tf.compat.v1.get_default_graph()
        attributes = {name: value for name, value in operation.node_def.attr.items() if name != "_class"}
        for function in _called_functions(operation, self._graph):
            graph._add_function_recursive(function)
        dtypes = [tensor.dtype for tensor in operation.outputs]
        copy = graph._create_op_internal(
            operation.type, list(inputs), dtypes, name=operation.name, attrs=attributes, op_def=operation.op_def
        )
        for source, output in zip(operation.outputs, copy.outputs, strict=True):
            output.set_shape(source.shape)  # Python code may have set a more precise shape
        return list(copy.outputs)

    def _as_traced(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a tensor as the traced program computes it from local rows and the inputs of declarations."""
        reference = tensor.ref()
        entry = self._tensors.get(reference)
        if entry is not None and entry.local is not None and (entry.is_traced or reference in self._roots):
            return entry.local
        if reference not in self._copies:
            outputs = self._copy(tensor.op, [self._as_traced(operand) for operand in tensor.op.inputs])
            self._copies |= {source.ref(): copy for source, copy in zip(tensor.op.outputs, outputs, strict=True)}
        return self._copies[reference]

    def _local(self, tensor: _Tensor) -> tf.Tensor:
        """Returns the local form, derived from the full form if necessary."""
        if tensor.local is None:
            label, full = tensor.value.label, tensor.full
            if isinstance(label, Rows):
                tensor.local, tensor.is_cut = self._local_rows(full, label.axis), True
            elif tensor.value.numbers is not None:
                tensor.local = self._scale(full, -_powers(tensor.value.numbers))
            else:
                tensor.local = full
        return tensor.local

    def _local_rows(self, full: tf.Tensor, axis: int) -> tf.Tensor:
        if self._offset is None:
            [counts] = self._collectives.stack([self._valid_rows], name=f"partition/{next(self._names)}")
            offset = tf.reduce_sum(counts[: self._collectives.rank])
            self._offset = tf.minimum(offset, self._batch_size - self._computed_rows)  # smaller only if no row is valid
        row_size = tf.shape(full)[axis] // self._batch_size
        begin = self._offset * row_size
        return full[(slice(None),) * axis + (slice(begin, begin + self._computed_rows * row_size),)]

    def _full_forms(self, tensors: Sequence[_Tensor]) -> list[tf.Tensor]:
        """Returns full forms; a single all-reduce computes all sums."""
        if sums := {id(entry): entry for entry in tensors if not entry.is_free and entry.sum_power is not None}:
            self._reduce(list(sums.values()))
        for entry in tensors:
            if entry.full is None:
                entry.full = self._full_form(entry)
        return [entry.full for entry in tensors]

    def _full_form(self, tensor: _Tensor) -> tf.Tensor:
        value, local, label = tensor.value, tensor.local, tensor.value.label
        if local.dtype == tf.variant:
            raise NotPartitionedError("a list of tensors is compared over rows")
        if local.dtype == tf.resource:
            return local
        if tensor.is_repeatable and not value.is_replicated:
            self._emit_full(tensor.source.op)
            return tensor.full
        if value.numbers is not None and _are_known(value.numbers):
            return self._full_numbers(value.numbers, local)
        if isinstance(label, Replicated):
            return local
        if isinstance(label, Partial):
            return self._reduce_extreme(local, label.reduction)
        if isinstance(label, Rows):
            return self._gather(self._scale(local, label.power or 0), label.axis)
        if not isinstance(label, ReplicatedPlusSum):
            raise NotPartitionedError(f"numbers of rows in {tensor.source.op.name}")
        self._emit_full(tensor.source.op)
        return tensor.full

    def _full_numbers(self, numbers: np.ndarray, local: tf.Tensor) -> tf.Tensor:
        """Returns the full form of known elements, bitwise equal on all replicas unless it depends on other dims."""
        powers = _powers(numbers)
        if not np.any(powers) or any(len(number.powers) > bool(number.power) for number in numbers.flat):
            return self._scale(local, powers)
        coefficients = np.vectorize(lambda number: float(number.coefficient), otypes=[float])(numbers)
        full = coefficients * tf.cast(self._batch_size, tf.float64) ** tf.constant(powers, tf.float64)
        return tf.cast(full if local.dtype.is_floating else tf.round(full), local.dtype)

    def _reduce(self, tensors: Sequence[_Tensor]) -> None:
        """Computes full forms of partial sums with one all-reduce, in single precision for half-precision values."""
        summands = [self._to_summable(self._scale(entry.local, entry.sum_power)) for entry in tensors]
        totals = self._collectives.all_reduce(summands, name=f"partition/{next(self._names)}")
        for entry, total in zip(tensors, totals, strict=True):
            entry.full = tf.cast(tf.ensure_shape(total, entry.local.shape), entry.local.dtype)

    def _to_summable(self, tensor: tf.Tensor) -> tf.Tensor:
        dtype = tensor.dtype
        if dtype.is_floating:
            return tf.cast(tensor, tf.float32) if dtype.size == 2 else tensor
        if not dtype.is_integer or dtype == tf.uint64:
            raise NotPartitionedError(f"sums of {dtype.name}")
        return tensor if dtype in (tf.int32, tf.int64) else tf.cast(tensor, tf.int64)

    def _reduce_extreme(self, local: tf.Tensor, reduction: str) -> tf.Tensor:
        """Returns the maximum or minimum over replicas, with booleans as 0 and 1."""
        sign = -1 if reduction in ("min", "all") else 1
        local_value = self._to_summable(tf.cast(local, tf.int32) if local.dtype == tf.bool else local)
        [extreme] = self._collectives.all_reduce([sign * local_value], "max", name=f"partition/{next(self._names)}")
        return tf.cast(tf.ensure_shape(sign * extreme, local.shape), local.dtype)

    def _gather(self, rows: tf.Tensor, axis: int) -> tf.Tensor:
        if to_transferable(rows, self._collectives).dtype not in self._collectives.dtypes.gatherable:
            raise NotPartitionedError(f"rows of {rows.dtype.name}")
        if rows.shape.rank is None:
            raise NotPartitionedError("rows of an unknown rank")
        order = [axis, *(number for number in range(rows.shape.rank) if number != axis)]
        leading_rows = tf.transpose(rows, order) if axis else rows
        all_rows = gather_any_rows(leading_rows, self._collectives, f"partition/{next(self._names)}")
        return tf.transpose(all_rows, np.argsort(order)) if axis else all_rows

    def _share(self, tensor: _Tensor) -> tf.Tensor:
        operation = tensor.source.op
        if tensor.full is None and tensor.sum_power is not None:
            local = self._scale(tensor.local, tensor.sum_power)
            return tf.where(self._valid_rows > 0, local, tf.zeros_like(local))
        if (
            tensor.full is None
            and isinstance(tensor.value.label, ReplicatedPlusSum)
            and operation.type in _LINEAR_TYPES
        ):
            return self._copy(operation, self.shares(operation.inputs))[tensor.source.value_index]
        [full] = self._full_forms([tensor])
        return full / tf.cast(self._collectives.size, full.dtype)

    def _share_of_slices(self, slices: tf.IndexedSlices) -> tf.IndexedSlices:
        """Returns the gradients of the table rows that the replica looks up, or its share of the gradients of all rows."""
        entries = [self._tensors[tensor.ref()] for tensor in (slices.values, slices.indices)]
        labels = [entry.value.label if entry.has_local else REPLICATED for entry in entries]
        powers = [label.power or 0 for label in labels if isinstance(label, Rows) and label.axis == 0]
        if len(powers) == 2:
            local_forms = [self._local(entry) for entry in entries]
            rows, indices = [self._scale(x, power) for x, power in zip(local_forms, powers, strict=True)]
            rows = tf.where(self._valid_rows > 0, rows, tf.zeros_like(rows))
        else:
            rows, indices = self._full_forms(entries)
            rows /= tf.cast(self._collectives.size, rows.dtype)
        rows.set_shape([*indices.shape, *slices.shape[1:]])
        return tf.IndexedSlices(rows, indices, tf.constant(slices.shape.as_list()))

    def _scale(self, tensor: tf.Tensor, power: Any) -> tf.Tensor:
        """Multiplies a tensor by a power of the batch's number of rows divided by the replica's; rounds integers."""
        if not np.any(power):
            return tensor
        ratio = tf.cast(self._batch_size, tf.float64) / tf.cast(self._computed_rows, tf.float64)
        factor = ratio ** tf.constant(power, tf.float64)
        if tensor.dtype.is_floating:
            return tensor * tf.cast(factor, tensor.dtype)
        return tf.cast(tf.round(tf.cast(tensor, tf.float64) * factor), tensor.dtype)


def _is_known(value: Value) -> bool:
    return not isinstance(value.label, AllRows) or _are_known(value.numbers)


def _are_known(numbers: np.ndarray | None) -> bool:
    return numbers is not None and None not in numbers.flat


def _differs(tensor: _Tensor) -> bool:
    """Returns whether the full form exists and differs from the local form."""
    if tensor.full is None:
        return False
    return not tensor.has_local or isinstance(tensor.value.label, Partial | ReplicatedPlusSum | Rows)


def _local_value(value: Value) -> Value | None:
    """Returns the abstract value of the local form that can be derived from a full form; None if there is none."""
    if value.numbers is not None and _are_known(value.numbers):
        return numeric_value(value.numbers, value.dims) if any(_powers(value.numbers).flat) else value
    value = dataclasses.replace(value, numbers=None)
    count_axes = [(axis, dim) for axis, dim in enumerate(value.dims or ()) if dim is not None and dim.power]
    if not count_axes:
        return value
    (axis, size), *other_axes = count_axes
    row_size = size.divided_by(COUNT)
    is_rows = not other_axes and row_size is not None and row_size.is_integer
    return dataclasses.replace(value, label=Rows(axis, size)) if is_rows else None


def _powers(numbers: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda number: number.power, otypes=[int])(numbers)


def _is_random(operation: tf.Operation, graph: Any) -> bool:
    """Returns whether an operation or a function that it calls draws random numbers."""
    if any(part in operation.type for part in _RANDOM_TYPES):
        return not any(part in operation.type for part in _KEY_TYPES)
    functions = _called_functions(operation, graph)
    return any(
        _is_random(called_operation, function.graph)
        for function in functions
        for called_operation in function.graph.get_operations()
    )


def _all_operations(graph: Any) -> list[tf.Operation]:
    """Returns the operations of a graph and of the functions that it calls."""
    operations = graph.get_operations()
    called_functions = [function for operation in operations for function in _called_functions(operation, graph)]
    graphs = {function.name: function.graph for function in called_functions}.values()
    return [*operations, *(operation for called_graph in graphs for operation in _all_operations(called_graph))]


def _called_functions(operation: tf.Operation, graph: Any) -> list[Any]:
    attributes = operation.node_def.attr.values()
    names = [function.name for value in attributes for function in (value.func, *value.list.func) if function.name]
    names += [operation.type] if graph._is_function(operation.type) else []
    functions = [graph._get_function(name) for name in names]
    if None in functions:  # TensorFlow drops the branches of a gradient of a gradient
        raise NotPartitionedError(f"the functions of {operation.type} {operation.name} are unknown")
    return functions
