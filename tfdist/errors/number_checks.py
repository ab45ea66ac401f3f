"""Checks for integers and numbers in arguments: NumPy's scalars count as well, booleans do not."""

import numbers
from typing import Any, TypeGuard


def is_integer(value: Any) -> TypeGuard[int]:
    """Returns whether a value is an integer, such as 3 or `numpy.int64(3)`."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a value is a real number, such as 3, 0.5 or `numpy.float32(0.5)`."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def as_python(value: Any) -> Any:
    """Returns an integer or a number as Python's int or float, which files and TensorFlow's constants take alike."""
    return int(value) if is_integer(value) else float(value)
