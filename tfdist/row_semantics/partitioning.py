"""Partitions a traced program by rows: replicas compute their local rows, and communicate what an operation needs of others.

As in GSPMD (Xu et al., 2021), each operation is emitted again, and each conversion of an operand follows from its label: a
partial sum is all-reduced where it is used in a way that is not linear, and rows are gathered where an operation compares
them. A value has two forms: the local form, which a replica computes from its rows and which a label describes, and the full
form, which one device computes from all rows. Backward passes are part of a traced program, and partitioned with it.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.collectives.interface import to_transferable
from tfdist.collectives.rows import gathered_rows
from tfdist.row_semantics.declarations import declarations
from tfdist.row_semantics.interpreter import Interpreter, in_order
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
    of_numbers,
    sum_power,
)

_LINEAR = ("Add", "AddV2", "AddN", "Sub", "Neg", "Identity")
_CHECKS = ("Assert", "PrintV2")  # operations without outputs that change nothing
_KEYS = ("FullInt", "GetKey", "GetAlg")  # of random operations
_RANDOM = ("Random", "Multinomial", "Binomial", "Poisson", "Gamma", "TruncatedNormal")


class NotPartitionedError(Exception):
    """A program cannot be partitioned; the message says why."""


@dataclasses.dataclass
class _Tensor:
    """A tensor of the traced program.

    Attributes:
      source: the tensor.
      value: what is known of the local form, if there is one; else the dims and numbers of the full form.
      has_local: whether it has a local form.
      local: the local form, once it has been emitted.
      full: the full form, once it has been emitted.
      is_traced: whether the local form is what the replica would compute by itself.
      is_repeatable: whether the operation can be repeated with full operands, which need no communication, for the full form.
      is_cut: whether the local form has been cut out of the full one.
    """

    source: tf.Tensor
    value: Value
    has_local: bool = True
    local: Any = None
    full: Any = None
    is_traced: bool = False
    is_repeatable: bool = False
    is_cut: bool = False

    @property
    def is_free(self) -> bool:
        """Whether the full form needs no communication."""
        known = self.value.is_replicated or _are_known(self.value.numbers)
        return known or self.is_repeatable or self.full is not None

    @property
    def may_be_rows(self) -> bool:
        """Whether it has been computed from all rows, and may have one element for each of them."""
        first = (self.value.dims or (ONE,))[0]
        return (
            isinstance(self.value.label, Replicated) and self.full is not None and (first is None or not first.is_known)
        )

    @property
    def sum_power(self) -> int | None:
        """The power of COUNT if the local form is a partial sum, or is scaled by a power; None if it is neither."""
        label = self.value.label
        return None if isinstance(label, Replicated) and not label.power else sum_power(label)


class Partitioned:
    """A traced program, emitted into the current graph for one replica."""

    def __init__(
        self,
        graph: Any,
        fed: Mapping[Any, tuple[Value, tf.Tensor]],
        results: Sequence[tf.Tensor],
        rows: tuple[tf.Tensor, tf.Tensor, tf.Tensor],
        collectives: Collectives,
    ):
        """Emits the operations that some results need.

        Args:
          graph: graph of the traced program.
          fed: for each of its placeholders, by reference, what is known of it and the tensor in the current graph.
          results: the tensors of the graph to compute.
          rows: scalars int32: number of rows that the replica computes, at least 1; number of them that count; rows of the
            whole batch.
          collectives: collectives of the replicas.

        Raises:
          NotPartitionedError: the program cannot be partitioned.
        """
        self._graph, self._collectives = graph, collectives
        self._computed, self._counted, self._batch_size = rows
        self._interpreter, self._of_one_device = Interpreter(), Interpreter(is_one_device=True)
        self._of_one_device.variables = self._interpreter.variables
        self._declared = declarations(graph)
        self._roots = {tensor.ref() for _, inputs in self._declared.values() for tensor in inputs}
        self._copies: dict[Any, tf.Tensor] = {}
        self._offset: tf.Tensor | None = None
        self._names = itertools.count()
        self._tensors: dict[Any, _Tensor] = {}
        for reference, (value, tensor) in fed.items():
            value = self._interpreter.with_static_shape(reference.deref(), value)
            self._tensors[reference] = _Tensor(reference.deref(), value, local=tensor, is_traced=True)
        if any(tensor.graph is not graph for tensor in results):
            raise NotPartitionedError("a result is computed inside a condition or a loop")
        changes = [each for each in _with_called(graph) if each.op_def.is_stateful and not each.outputs]
        if others := [each.type for each in changes if each.type not in _CHECKS]:
            raise NotPartitionedError(f"it changes a variable of TensorFlow by {others[0]}")
        checks = [each for each in changes if each.graph is graph]
        conditions = [each.inputs[0] for each in checks if each.type == "Assert"]
        self._needed = self._needed_by([*results, *conditions])
        for operation in in_order(graph):
            if operation.name in self._needed and operation.outputs[0].ref() not in self._tensors:
                self._emit(operation)
        for operation in checks:
            self._check(operation)

    def whole(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns results as one device computes them, the same on each replica."""
        return self._full_forms([self._tensors[tensor.ref()] for tensor in tensors])

    def shares(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns floating-point tensors whose sums over replicas are the results as one device computes them."""
        return [self._share(self._tensors[tensor.ref()]) for tensor in tensors]

    def are_whole(self, tensors: Sequence[tf.Tensor]) -> bool:
        """Returns whether each replica knows the results of one device, such as of gradients that are clipped by their norm."""
        results = [self._tensors[tensor.ref()] for tensor in tensors]
        return all(each.full is not None for each in results)

    def traced(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns tensors as the replica computes them by itself, such as statistics of its local rows."""
        return [self._as_traced(tensor) for tensor in tensors]

    def _check(self, operation: tf.Operation) -> None:
        """Emits an operation that changes nothing; an assertion about all rows together checks the full form."""
        inputs = [self._as_traced(tensor) for tensor in operation.inputs]
        if operation.type == "Assert":
            condition = self._tensors[operation.inputs[0].ref()]
            if condition.value.label != Partial("all"):
                [inputs[0]] = self._full_forms([condition])
        self._copy(operation, inputs)

    def _needed_by(self, results: Sequence[tf.Tensor]) -> dict[str, set[int]]:
        """Returns the used outputs of each operation that results need; of declared ones, only the declared inputs."""
        needed: dict[str, set[int]] = {}
        stack = list(results)
        while stack:
            tensor = stack.pop()
            operation = tensor.op
            if operation.name not in needed and tensor.ref() not in self._tensors:
                stack.extend(
                    self._inputs_of_declared(operation) if operation.name in self._declared else operation.inputs
                )
            needed.setdefault(operation.name, set()).add(tensor.value_index)
        return needed

    def _inputs_of_declared(self, operation: tf.Operation) -> list[tf.Tensor]:
        """Returns the inputs of a declaration, and those of others from which its tensor is computed."""
        inputs, seen, stack = list(self._declared[operation.name][1]), set(), list(operation.inputs)
        while stack:
            tensor = stack.pop()
            if tensor.ref() in self._roots or tensor.ref() in self._tensors:
                inputs.append(tensor)
            elif tensor.op.name not in seen:
                seen.add(tensor.op.name)
                stack.extend(tensor.op.inputs)
        return inputs

    def _emit(self, operation: tf.Operation) -> None:
        """Emits an operation with its local operands, if their labels determine that of the result; else with full ones."""
        if operation.name in self._declared:
            return self._emit_declared(operation)
        inputs = [self._tensors[tensor.ref()] for tensor in operation.inputs]
        if not self._stays_full(inputs) and all(each.has_local for each in inputs):
            values = self._values(self._interpreter, operation, [each.value for each in inputs])
            used = self._needed[operation.name]
            is_of_axes = operation.type == "BroadcastGradientArgs"  # returns other axes for a single row
            is_known = (lambda value: _are_known(value.numbers)) if is_of_axes else _is_known
            if all(is_known(value) for number, value in enumerate(values) if number in used):
                outputs = self._copy(operation, [self._local(each) for each in inputs])
                if is_of_axes:
                    pairs = zip(values, outputs, strict=True)
                    outputs = [tf.constant(v.integers, x.dtype) if _are_known(v.numbers) else x for v, x in pairs]
                is_traced = all(each.is_traced for each in inputs)
                draws = _draws(operation, self._graph)
                if draws and any(isinstance(value.label, Replicated) for value in values):
                    raise NotPartitionedError(f"{operation.type} draws a number for all rows")
                repeatable = not draws and all(each.is_free for each in inputs)
                for source, value, local in zip(operation.outputs, values, outputs, strict=True):
                    self._tensors[source.ref()] = _Tensor(
                        source, value, local=local, is_traced=is_traced, is_repeatable=repeatable
                    )
                return None
        return self._emit_full(operation)

    def _emit_declared(self, operation: tf.Operation) -> None:
        declaration, inputs = self._declared[operation.name]
        known = [self._tensors[tensor.ref()] for tensor in inputs]
        for each in known:
            if each.has_local:
                self._local(each)
        if any(not each.has_local or each.is_cut or each.may_be_rows for each in known):
            raise NotPartitionedError("a function of rows that are compared is declared to be one of each row")
        (source,) = operation.outputs
        value = self._interpreter.with_static_shape(source, declaration(*[each.value for each in known]))
        if not _is_known(value):
            raise NotPartitionedError(f"{operation.name} is computed from all rows")
        self._tensors[source.ref()] = _Tensor(source, value, local=self._as_traced(source), is_traced=True)

    def _emit_full(self, operation: tf.Operation) -> None:
        """Emits an operation with full operands; its results are full, whatever the operation."""
        if _draws(operation, self._graph):
            raise NotPartitionedError(f"{operation.type} draws random numbers for all rows")
        inputs = [self._tensors[tensor.ref()] for tensor in operation.inputs]
        full_inputs = self._full_forms(inputs)
        values_of_inputs = [dataclasses.replace(each.value, label=REPLICATED) for each in inputs]
        values = self._values(self._of_one_device, operation, values_of_inputs)
        for source, value, full in zip(operation.outputs, values, self._copy(operation, full_inputs), strict=True):
            if known := self._tensors.get(source.ref()):
                known.full = full
                continue
            described = self._of_one_device.with_static_shape(source, dataclasses.replace(value, label=REPLICATED))
            local = _local_of_full(described)
            self._tensors[source.ref()] = _Tensor(source, local or described, local is not None, full=full)

    def _values(self, interpreter: Interpreter, operation: tf.Operation, inputs: Sequence[Value]) -> list[Value]:
        results = interpreter.results(self._graph, Call(operation, inputs, interpreter.variables))
        pairs = zip(operation.outputs, results, strict=True)
        return [interpreter.with_static_shape(tensor, value) for tensor, value in pairs]

    def _stays_full(self, inputs: Sequence[_Tensor]) -> bool:
        """Returns whether the full operands cost nothing, and some differ from their local forms."""
        return any(_differs(each) for each in inputs) and all(each.is_free for each in inputs)

    def _copy(self, operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Emits an operation with other operands."""
        graph = tf.compat.v1.get_default_graph()
        attributes = {name: value for name, value in operation.node_def.attr.items() if name != "_class"}
        for function in _functions(operation, self._graph):
            graph._add_function_recursive(function)
        dtypes = [tensor.dtype for tensor in operation.outputs]
        copy = graph._create_op_internal(
            operation.type, list(inputs), dtypes, name=operation.name, attrs=attributes, op_def=operation.op_def
        )
        for source, output in zip(operation.outputs, copy.outputs, strict=True):
            output.set_shape(source.shape)  # Python code may know more of the shape than the operation
        return list(copy.outputs)

    def _as_traced(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns a tensor as the replica computes it by itself from its rows, and from the inputs of declarations."""
        reference = tensor.ref()
        known = self._tensors.get(reference)
        if known is not None and known.local is not None and (known.is_traced or reference in self._roots):
            return known.local
        if reference not in self._copies:
            outputs = self._copy(tensor.op, [self._as_traced(each) for each in tensor.op.inputs])
            self._copies |= {source.ref(): copy for source, copy in zip(tensor.op.outputs, outputs, strict=True)}
        return self._copies[reference]

    def _local(self, tensor: _Tensor) -> tf.Tensor:
        """Returns the local form, computed from the full one if it must be."""
        if tensor.local is None:
            label, full = tensor.value.label, tensor.full
            if isinstance(label, Rows):
                tensor.local, tensor.is_cut = self._local_rows(full, label.axis), True
            elif tensor.value.numbers is not None:
                tensor.local = self._scaled(full, -_powers(tensor.value.numbers))
            else:
                tensor.local = full
        return tensor.local

    def _local_rows(self, full: tf.Tensor, axis: int) -> tf.Tensor:
        if self._offset is None:
            [counts] = self._collectives.stack([self._counted], name=f"partition/{next(self._names)}")
            first = tf.reduce_sum(counts[: self._collectives.rank])
            self._offset = tf.minimum(first, self._batch_size - self._computed)  # the last one if no row counts
        of_one = tf.shape(full)[axis] // self._batch_size
        begin = self._offset * of_one
        return full[(slice(None),) * axis + (slice(begin, begin + self._computed * of_one),)]

    def _full_forms(self, tensors: Sequence[_Tensor]) -> list[tf.Tensor]:
        """Returns full forms; all sums among them are computed by one call."""
        if sums := {id(each): each for each in tensors if not each.is_free and each.sum_power is not None}:
            self._reduce(list(sums.values()))
        for each in tensors:
            if each.full is None:
                each.full = self._full_form(each)
        return [each.full for each in tensors]

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
            return self._scaled(local, _powers(value.numbers))
        if isinstance(label, Replicated):
            return local
        if isinstance(label, Partial):
            return self._extreme(local, label.reduction)
        if isinstance(label, Rows):
            return self._gathered(self._scaled(local, label.power or 0), label.axis)
        if not isinstance(label, ReplicatedPlusSum):
            raise NotPartitionedError(f"numbers of rows in {tensor.source.op.name}")
        self._emit_full(tensor.source.op)
        return tensor.full

    def _reduce(self, tensors: Sequence[_Tensor]) -> None:
        """Sums partial sums over replicas; half-precision sums are computed in single precision, as on one device."""
        sent = [self._summable(self._scaled(each.local, each.sum_power)) for each in tensors]
        totals = self._collectives.all_reduce(sent, name=f"partition/{next(self._names)}")
        for each, total in zip(tensors, totals, strict=True):
            each.full = tf.cast(tf.ensure_shape(total, each.local.shape), each.local.dtype)

    def _summable(self, tensor: tf.Tensor) -> tf.Tensor:
        dtype = tensor.dtype
        if dtype.is_floating:
            return tf.cast(tensor, tf.float32) if dtype.size == 2 else tensor
        if not dtype.is_integer or dtype == tf.uint64:
            raise NotPartitionedError(f"sums of {dtype.name}")
        return tensor if dtype in (tf.int32, tf.int64) else tf.cast(tensor, tf.int64)

    def _extreme(self, local: tf.Tensor, reduction: str) -> tf.Tensor:
        """Returns the largest or smallest element over replicas; False is 0, and True is 1."""
        sign = -1 if reduction in ("min", "all") else 1
        number = self._summable(tf.cast(local, tf.int32) if local.dtype == tf.bool else local)
        [full] = self._collectives.all_reduce([sign * number], "max", name=f"partition/{next(self._names)}")
        return tf.cast(tf.ensure_shape(sign * full, local.shape), local.dtype)

    def _gathered(self, rows: tf.Tensor, axis: int) -> tf.Tensor:
        if to_transferable(rows, self._collectives).dtype not in self._collectives.wire.gathers:
            raise NotPartitionedError(f"rows of {rows.dtype.name}")
        order = [axis, *(number for number in range(rows.shape.rank) if number != axis)]
        first = tf.transpose(rows, order) if axis else rows
        full = gathered_rows(first, self._collectives, f"partition/{next(self._names)}")
        return tf.transpose(full, np.argsort(order)) if axis else full

    def _share(self, tensor: _Tensor) -> tf.Tensor:
        operation = tensor.source.op
        if tensor.full is None and tensor.sum_power is not None:
            local = self._scaled(tensor.local, tensor.sum_power)
            return tf.where(self._counted > 0, local, tf.zeros_like(local))
        if tensor.full is None and isinstance(tensor.value.label, ReplicatedPlusSum) and operation.type in _LINEAR:
            return self._copy(operation, self.shares(operation.inputs))[tensor.source.value_index]
        [full] = self._full_forms([tensor])
        return full / tf.cast(self._collectives.size, full.dtype)

    def _scaled(self, tensor: tf.Tensor, power: Any) -> tf.Tensor:
        """Returns a tensor times a power of (rows of the batch / rows of the replica); integers are rounded."""
        if not np.any(power):
            return tensor
        ratio = tf.cast(self._batch_size, tf.float64) / tf.cast(self._computed, tf.float64)
        factor = ratio ** tf.constant(power, tf.float64)
        if tensor.dtype.is_floating:
            return tensor * tf.cast(factor, tensor.dtype)
        return tf.cast(tf.round(tf.cast(tensor, tf.float64) * factor), tensor.dtype)


def _is_known(value: Value) -> bool:
    return not isinstance(value.label, AllRows) or _are_known(value.numbers)


def _are_known(numbers: np.ndarray | None) -> bool:
    return numbers is not None and None not in numbers.flat


def _differs(tensor: _Tensor) -> bool:
    """Returns whether the full form exists, and is not the same as the local one."""
    if tensor.full is None:
        return False
    return not tensor.has_local or isinstance(tensor.value.label, Partial | ReplicatedPlusSum | Rows)


def _local_of_full(value: Value) -> Value | None:
    """Returns what is known of the local form that can be derived from a full one; None if none can."""
    if value.numbers is not None and _are_known(value.numbers):
        return of_numbers(value.numbers, value.dims) if any(_powers(value.numbers).flat) else value
    value = dataclasses.replace(value, numbers=None)
    counted = [(axis, dim) for axis, dim in enumerate(value.dims or ()) if dim is not None and dim.power]
    if not counted:
        return value
    (axis, size), *others = counted
    of_one = size.divided_by(COUNT)
    is_rows = not others and of_one is not None and of_one.is_integer
    return dataclasses.replace(value, label=Rows(axis, size)) if is_rows else None


def _powers(numbers: np.ndarray) -> np.ndarray:
    """Returns the power of COUNT of each number."""
    return np.vectorize(lambda number: number.power, otypes=[int])(numbers)


def _draws(operation: tf.Operation, graph: Any) -> bool:
    """Returns whether an operation, or a function that it calls, draws random numbers."""
    if any(part in operation.type for part in _RANDOM):
        return not any(part in operation.type for part in _KEYS)
    functions = _functions(operation, graph)
    return any(_draws(each, function.graph) for function in functions for each in function.graph.get_operations())


def _with_called(graph: Any) -> list[tf.Operation]:
    """Returns the operations of a graph, and those of the functions that they call."""
    operations = graph.get_operations()
    called = {function.name: function.graph for each in operations for function in _functions(each, graph)}
    return [*operations, *(inner for each in called.values() for inner in _with_called(each))]


def _functions(operation: tf.Operation, graph: Any) -> list[Any]:
    """Returns the functions that an operation of a graph calls."""
    attributes = operation.node_def.attr.values()
    names = [each.name for value in attributes for each in (value.func, *value.list.func) if each.name]
    names += [operation.type] if graph._is_function(operation.type) else []
    return [graph._get_function(name) for name in names]
