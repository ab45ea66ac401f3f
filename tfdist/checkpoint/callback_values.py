"""Encodes the state of callbacks as JSON and arrays: plain data, so that loading it executes nothing."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from tfdist.checkpoint.format.dtypes import DTYPES, is_known
from tfdist.coordination import Json


def encoded(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Json:
    """Returns a value as JSON that refers to arrays by name.

    Args:
      value: numbers, strings, None, arrays, tensors, and lists, tuples and dicts of these.
      name: name of its array, or prefix of the names of the arrays in it.
      arrays: receives the arrays, which are not copied.

    Raises:
      TypeError: it is something else.
      RecursionError: it contains itself.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": value.hex()}  # JSON has neither inf nor NaN
    if type(value) in (list, tuple):
        items = [encoded(item, f"{name}/{number}", arrays) for number, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if type(value) is dict:
        return {"dict": encoded([*value.values()], name, arrays), "keys": [encoded(key, name, {}) for key in value]}
    array = np.asarray(value) if hasattr(value, "__array__") else None
    if array is None or not is_known(array.dtype):
        raise TypeError(f"{value!r:.60} of type {type(value).__name__}")
    if not array.ndim:
        return {"scalar": array.dtype.name, "value": encoded(array.item(), name, arrays)}
    arrays[name] = array
    return {"array": name}


def decoded(value: Any, read: Callable[[str], np.ndarray]) -> Any:
    """Decodes the result of `encoded`; `read` returns an array by name.

    Raises:
      ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError: it is not such a result.
    """
    if isinstance(value, list):
        return [decoded(item, read) for item in value]
    if not isinstance(value, dict):
        return value
    if "float" in value:
        return float.fromhex(value["float"])
    if "scalar" in value:
        return DTYPES[value["scalar"]].type(decoded(value["value"], read))
    if "array" in value:
        return read(value["array"])
    if "tuple" in value:
        return tuple(decoded(value["tuple"], read))
    return dict(zip(decoded(value["keys"], read), decoded(value["dict"], read), strict=True))
