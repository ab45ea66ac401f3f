"""Says in words what a label means, and which line of a user's code decided it."""

import os
import pathlib
from typing import Any

import keras
import tensorflow as tf

from tfdist.row_semantics.labels import AllRows, Label

_FILES = (str(tf.__file__), str(keras.__file__), str(pathlib.Path(__file__).parent))
_LIBRARIES = tuple(os.path.dirname(os.path.abspath(file)) + os.sep for file in _FILES)


def explained(label: Label) -> str:
    """Returns a label in words and, if it depends on all rows, the operation that decided it and its line."""
    if not isinstance(label, AllRows):
        return f"a {label}"
    return "computed from all rows together" + (f", by {_place(label.cause)}" if label.cause is not None else "")


def _place(operation: Any) -> str:
    """Returns the type of an operation, and the line of a user's code that created it."""
    frames = [frame for frame in operation.traceback or [] if not frame.filename.startswith((*_LIBRARIES, "<"))]
    return f"{operation.type} " + (f"in {frames[-1].filename}:{frames[-1].lineno}" if frames else operation.name)
