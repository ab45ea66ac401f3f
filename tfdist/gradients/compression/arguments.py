"""Validates the parameters of compression methods, and compiles parts of a method with XLA."""

import functools
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.errors import InputError, is_integer, is_number


def validate_integer(method: str, parameter: str, value: int, low: int, high: int, *, multiple: int = 1) -> int:
    """Returns an integer in [low, high] that is a multiple of `multiple`; raises `InputError` for anything else."""
    if not is_integer(value) or not low <= value <= high or value % multiple:
        kind = f"a multiple of {multiple}" if multiple > 1 else "a whole number"
        raise InputError(
            f"{method} needs {parameter} to be {kind} from {low} to {high}. Received: {value!r}. "
            f"For example, use {method}({parameter}={low})."
        )
    return int(value)


def validate_flag(method: str, parameter: str, value: bool) -> bool:
    """Returns a bool; raises `InputError` with the names of method and parameter for anything else."""
    if not isinstance(value, bool):
        raise InputError(f"{method} needs {parameter}=True or False. Received: {value!r}. Omit it for the default.")
    return value


def validate_ratio(method: str, ratio: float) -> float:
    """Returns a ratio in (0, 1]; raises `InputError` with the method's name for anything else."""
    if not is_number(ratio) or not 0 < ratio <= 1:
        raise InputError(
            f"{method} needs a ratio in (0, 1]. Received: {ratio!r}. For example, use {method}(ratio=0.01)."
        )
    return float(ratio)


def validate_positive(method: str, parameter: str, value: float) -> float:
    """Returns a finite number above 0; raises `InputError` with the names of method and parameter for anything else."""
    if not is_number(value) or not 0 < value < math.inf:
        raise InputError(
            f"{method} needs a finite {parameter} above 0. Received: {value!r}. For example, use {parameter}=2.5."
        )
    return float(value)


def selection_size(ratio: float, size: int) -> int:
    """Returns the number of elements to send out of `size`: max(1, round(ratio size)), or 0 for an empty vector."""
    return min(size, max(1, round(ratio * size)))


def run_with_xla(function: Callable[..., Any], *args: int | tf.Tensor) -> Any:
    """Calls a function of ints and tensors, compiled by XLA once for each combination of ints and shapes."""
    # One `tf.function` for each combination, because TensorFlow warns about a function that is retraced often.
    return _compiled(function, *(arg if isinstance(arg, int) else tuple(arg.shape) for arg in args))(*args)


@functools.cache
def _compiled(function: Callable[..., Any], *_: Any) -> Callable[..., Any]:
    return tf.function(function, jit_compile=True, autograph=False)
