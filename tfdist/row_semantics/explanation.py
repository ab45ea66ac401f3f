"""Says in words what a label means, and which line of a user's code decided it."""

import os
import pathlib
from typing import Any

import keras
import tensorflow as tf

from tfdist.row_semantics.labels import AllRows, Label, Partial, Replicated, ReplicatedPlusSum, Rows
from tfdist.row_semantics.sizes import COUNT

_FILES = (str(tf.__file__), str(keras.__file__), str(pathlib.Path(__file__).parent))
_LIBRARIES = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in _FILES)
_REDUCTIONS = {
    "sum": "a sum over rows",
    "max": "a maximum over rows",
    "min": "a minimum over rows",
    "all": "a logical and over rows",
    "any": "a logical or over rows",
}


def explained(label: Label) -> str:
    """Returns a label in words and, if it depends on all rows, the operation that decided it and its line."""
    match label:
        case Replicated(None) | Rows(_, _, None):
            return "zero"
        case Replicated(power):
            return "the same on all replicas" + _times(power, "the number of rows")
        case Rows(axis, size, power):
            count = "one value" if size == COUNT else "several values"
            along = f" along axis {axis}" if axis else ""
            return f"{count} for each row{along}" + _times(power, "the number of rows")
        case Partial("sum", power) if power < 0:
            return "a mean over rows" + _times(power + 1, "their number")
        case Partial(reduction, power):
            return _REDUCTIONS[reduction] + _times(power, "their number")
        case ReplicatedPlusSum(power, variable):
            before = "a value that is the same on all replicas" if variable is None else "its value before"
            return f"{before} plus {explained(Partial('sum', power))}"
        case AllRows(cause):
            return "computed from all rows together" + (f", by {_place(cause)}" if cause is not None else "")


def _times(power: int | None, number: str) -> str:
    """Returns how a value is multiplied by a power of the number of rows."""
    if not power:
        return ""
    names = {1: number, 2: f"the square of {number}"}
    return (" times " if power > 0 else " divided by ") + names.get(abs(power), f"{number} to the power {abs(power)}")


def _place(operation: Any) -> str:
    """Returns the type of an operation, and the line of a user's code that created it."""
    frames = [frame for frame in operation.traceback or [] if not frame.filename.startswith((*_LIBRARIES, "<"))]
    if not frames:
        return f"{operation.type} {operation.name}"
    file = min(frames[-1].filename, os.path.relpath(frames[-1].filename), key=len)
    return f"{operation.type} in {file}:{frames[-1].lineno}"
