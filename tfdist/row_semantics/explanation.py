"""Explains labels: their meaning, the line of user code that caused them, and their effect on a step."""

import contextlib
import contextvars
import dataclasses
import dis
import os
import pathlib
import sys
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import RecordedCall
from tfdist.collectives.interface import tensor_bytes
from tfdist.errors import byte_size, count_of
from tfdist.row_semantics.sizes import COUNT
from tfdist.row_semantics.values import AllRows, Label, Partial, Replicated, ReplicatedPlusSum, Rows

Combination = Literal["mean", "sum", "same", "rows", ""]
_FILES = (str(tf.__file__), str(keras.__file__), str(pathlib.Path(__file__).parent))
_LIBRARIES = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in _FILES)
_REDUCTIONS = {"sum": "sum", "max": "maximum", "min": "minimum", "all": "logical and", "any": "logical or"}
_PHRASES = {
    "gradient": "the gradient of {}",
    "result": '"{}", which it returns,',
    "metric": "the metric variable {}",
    "variable": "{}, which it assigns,",
    "output": "an output",
}
_COMBINATIONS = {"mean": "averaged", "sum": "summed", "same": "the same", "rows": "each its own", "": "need all rows"}


class LabelledValue(NamedTuple):
    """A value of a step, its label, and how the replicas' values are combined: `op`, "" if they cannot be combined."""

    kind: Literal["loss", "gradient", "metric", "variable", "result", "output"]
    name: str
    label: Label
    op: Combination

    @property
    def sentence(self) -> str:
        """The value and its label, in words."""
        return f"{_PHRASES.get(self.kind, '{}').format(self.name)} is {describe_label(self.label)}"


class Communication(NamedTuple):
    """What replicas communicate, in addition to gradients, in a step that needs all rows."""

    calls: Sequence[RecordedCall] = ()
    obstacle: str = ""  # why the step cannot be partitioned, so that replicas compute the whole batch; empty if it can

    def count(self, operation: str) -> int:
        """Returns the number of tensors that an operation, "all_reduce" or "all_gather", communicates."""
        return sum(len(call.shapes) for call in self.calls if call.operation == operation)

    def __str__(self) -> str:
        """The communicated sums and rows, in words."""
        sums, rows = self.count("all_reduce"), self.count("all_gather")
        size = sum(call.payload_bytes for call in self.calls if call.operation == "all_reduce")
        parts = [f"{sums} sums or extremes ({byte_size(size)})"] if sums else []
        return " and ".join([*parts, *([f"the rows of {count_of(rows, 'tensor')}"] if rows else [])]) or "nothing else"

    @property
    def whole_batch(self) -> str:
        """What a replica does in a step that cannot be partitioned."""
        return f"computes the whole batch ({self.obstacle}), with the result and the speed of one device"

    @property
    def fallback(self) -> str:
        """What replicas do if values cannot be combined."""
        if self.obstacle:
            return f"every replica gathers and {self.whole_batch}"
        return f"replicas compute their own rows, and besides gradients communicate {self} in each step"


class Explanation(NamedTuple):
    """The values of a step, and their effect on replicas."""

    step: str  # description of the step
    values: Sequence[LabelledValue]
    reason: str  # why the replicas' values cannot be combined, if no single value is the cause; otherwise empty
    fallback: str  # what replicas do if the values cannot be combined
    trained_variables: Sequence[keras.Variable]  # the variables that have gradients
    calls: Sequence[RecordedCall]  # collective calls in the code of the step
    communication: Communication | None = None  # of a step of Keras's `fit` whose values cannot be combined
    types_without_rule: Collection[str] = ()  # types of operations in the step that have no rule

    def rows(self, *, all_values: bool) -> list[tuple[str, str, str]]:
        """Returns the rows of a table, with similar values in one row; `all_values` includes values that can be combined."""
        groups: dict[tuple[str, str, str], list[str]] = {}
        for kind, name, label, op in self.values:
            if all_values or not op:
                groups.setdefault((kind, describe_label(label), _COMBINATIONS[op]), []).append(name)

        def title(kind: str, names: Sequence[str]) -> str:
            return f"{kind} {', '.join(names)}" if len(names) < 4 else f"{count_of(len(names), kind)} ({names[0]}, ...)"

        return [(title(kind, names), meaning, op) for (kind, meaning, op), names in groups.items()]

    @property
    def summary(self) -> str:
        """The effect on replicas, in one line."""
        count, failures = count_of(len(self.values), "value"), sum(not value.op for value in self.values)
        if failures or self.reason:
            reason = f"{failures} of {count} cannot be combined from those of replicas" if failures else self.reason
            return f"{reason}: {self.fallback}."
        verbs = {_COMBINATIONS[value.op] for value in self.values if value.kind == "gradient"} or {"averaged"}
        size = sum(tensor_bytes(tf.TensorSpec(variable.shape, variable.dtype)) for variable in self.trained_variables)
        calls = ", ".join(f"{call.name} ({_size(call)})" for call in self.calls)
        return (
            f"All {count} are means, sums or rows: gradients ({byte_size(size)}) are {' or '.join(sorted(verbs))}, metrics are "
            f"summed when they are logged, and {f'a step communicates {calls}' if calls else 'nothing else is communicated'}."
        )


def _size(call: RecordedCall) -> str:
    row_shapes = tuple(tuple(1 if dim is None else dim for dim in shape) for shape in call.shapes)
    suffix = "" if row_shapes == call.shapes else " for each row"
    return byte_size(dataclasses.replace(call, shapes=row_shapes).payload_bytes) + suffix


_Listener = Callable[[Explanation], None]
_listener: contextvars.ContextVar[_Listener | None] = contextvars.ContextVar("listener", default=None)
listener = _listener.get


@contextlib.contextmanager
def using_listener(function: _Listener) -> Iterator[None]:
    """Context in which `function` is the `listener`, which is called with the explanation of each step before the step runs."""
    token = _listener.set(function)
    try:
        yield
    finally:
        _listener.reset(token)


def describe_label(label: Label) -> str:
    """Describes a label and, for a value that depends on all rows, the operation that causes this and its line of code."""
    match label:
        case Replicated(None) | Rows(_, _, None):
            return "zero"
        case Replicated(power):
            return "the same on all replicas" + _power_phrase(power, "the number of rows")
        case Rows(axis, size, power):
            count = "one value" if size == COUNT else "several values"
            axis_clause = f" along axis {axis}" if axis else ""
            return f"{count} for each row{axis_clause}" + _power_phrase(power, "the number of rows")
        case Partial("sum", power) if power < 0:
            return "a mean over rows" + _power_phrase(power + 1, "their number")
        case Partial(reduction, power):
            return f"a {_REDUCTIONS[reduction]} over rows" + _power_phrase(power, "their number")
        case ReplicatedPlusSum(power, variable):
            base = "a value that is the same on all replicas" if variable is None else "its value before"
            return f"{base} plus {describe_label(Partial('sum', power))}"
        case AllRows(cause):
            location = f", by {_operation_location(cause)}" if cause is not None else ""
            return f"computed from all rows together{location}"


@contextlib.contextmanager
def record_static_row_reads() -> Iterator[list[str]]:
    """Context that records where user code reads the first, unknown dim of a tensor's static shape."""
    getitem, iterate, as_list = tf.TensorShape.__getitem__, tf.TensorShape.__iter__, tf.TensorShape.as_list
    notes: list[str] = []

    def record(caller: types.FrameType) -> None:
        if _is_user_code(caller.f_code.co_filename):
            location = f"{_shortest_path(caller.f_code.co_filename)}:{caller.f_lineno}"
            notes.append(f"the number of rows is read from a static shape, not by keras.ops.shape, in {location}")

    def recording_getitem(shape: tf.TensorShape, key: Any) -> Any:
        dim = getitem(shape, key)
        if dim is None and isinstance(key, int) and key in (0, -shape.rank):
            record(sys._getframe(1))
        return dim

    def recording_iter(shape: tf.TensorShape) -> Iterator[Any]:
        caller = sys._getframe(1)
        if _is_user_code(caller.f_code.co_filename) and shape.rank and getitem(shape, 0) is None:
            if _reads_first_variable(caller):  # costs 2 ms
                record(caller)
        return iterate(shape)

    class RecordingList(list):
        def __getitem__(self, key: Any) -> Any:
            dim = super().__getitem__(key)
            if dim is None and isinstance(key, int) and key in (0, -len(self)):
                record(sys._getframe(1))
            return dim

    methods = {
        "__getitem__": recording_getitem,
        "__iter__": recording_iter,
        "as_list": lambda shape: RecordingList(as_list(shape)),
    }
    with keras_internals.patched(*((tf.TensorShape, name, method) for name, method in methods.items())):
        yield notes


def _reads_first_variable(frame: types.FrameType) -> bool:
    """Returns whether a frame unpacks a sequence, such as `b, *_ = x.shape`, and uses the first variable."""
    instructions = list(dis.get_instructions(frame.f_code))
    index = [instruction.offset for instruction in instructions].index(frame.f_lasti)
    if not instructions[index].opname.startswith("UNPACK_"):
        return False
    # Python 3.13 merges some instructions, which then have several names.
    operands = [i.argval if isinstance(i.argval, tuple) else (i.argval,) for i in instructions]
    loads = [names for i, names in zip(instructions, operands, strict=True) if i.opname.startswith("LOAD_")]
    return any(operands[index + 1][0] in names for names in loads)


def _is_user_code(filename: str) -> bool:
    return not filename.startswith((*_LIBRARIES, "<"))


def _shortest_path(name: str) -> str:
    return min(name, os.path.relpath(name), key=len)


def _power_phrase(power: int | None, number: str) -> str:
    """Describes the multiplication by a power of the number of rows; empty for the power 0."""
    if not power:
        return ""
    names = {1: number, 2: f"the square of {number}"}
    return (" times " if power > 0 else " divided by ") + names.get(abs(power), f"{number} to the power {abs(power)}")


def _operation_location(operation: Any) -> str:
    """Returns the type of an operation, and the line of user code that created it."""
    frames = [frame for frame in operation.traceback or [] if _is_user_code(frame.filename)]
    if not frames:
        return f"{operation.type} {operation.name}"
    return f"{operation.type} in {_shortest_path(frames[-1].filename)}:{frames[-1].lineno}"
