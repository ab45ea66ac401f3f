"""Validation of the arguments of models.

Each function returns a value of the right type, or raises `InputError` with the names of the model and of the argument.
"""

from collections.abc import Sequence
from typing import Any

from tfdist.errors import InputError
from tfdist.errors.numbers import is_integer, is_number


def positive(model: str, name: str, value: Any) -> int:
    """Returns a positive integer."""
    if not _is_positive(value):
        remedy = f" The data set does not know it: write {model}({name}=...)." if value is None else ""
        raise InputError(f"{model}: {name} must be an integer, at least 1. Received: {value!r}.{remedy}")
    return int(value)


def sizes(model: str, name: str, value: Any) -> tuple[int, ...]:
    """Returns a tuple of positive integers; a single integer stands for a tuple of one."""
    values = (value,) if is_integer(value) else value
    if not isinstance(values, Sequence) or not all(map(_is_positive, values)):
        raise InputError(f"{model}: {name} must be integers, at least 1, such as (64, 32). Received: {value!r}.")
    return tuple(map(int, values))


def rate(model: str, name: str, value: Any) -> float:
    """Returns a number in [0, 1)."""
    if not is_number(value) or not 0 <= value < 1:
        raise InputError(f"{model}: {name} must be a number in [0, 1). Received: {value!r}.")
    return float(value)


def shape(model: str, value: Any, dims: Sequence[str] = ()) -> tuple[int, ...]:
    """Returns the static shape of one example; `dims`: names of the dims of the model's input, empty for any."""
    dim_sizes = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (None,)
    if not all(map(_is_positive, dim_sizes)) or (dims and len(dim_sizes) != len(dims)):
        rule = f"be ({', '.join(dims)}{',' if len(dims) == 1 else ''})" if dims else "have known sizes only"
        raise InputError(
            f"{model}: an example's shape must {rule}. Received: {value!r}. Use a model that fits the data."
        )
    return tuple(map(int, dim_sizes))


def _is_positive(value: Any) -> bool:
    return is_integer(value) and int(value) >= 1
