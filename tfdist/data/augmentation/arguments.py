"""The type of an augmentation, and validation of its arguments."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.data.augmentation.row_random import RowRandom
from tfdist.errors import InputError
from tfdist.errors.number_checks import is_integer, is_number

# (images [n, height, width, channels], random numbers of the rows) -> images of the same shape and dtype; row by row.
Augmentation = Callable[[tf.Tensor, RowRandom], tf.Tensor]


def fraction(name: str, argument: str, value: Any) -> float:
    """Returns a number in [0, 1].

    Raises:
      InputError: the value is something else.
    """
    if not is_number(value) or not 0 <= value <= 1:
        raise InputError(f"{name}: {argument} must be in [0, 1]. Received: {value!r}.")
    return float(value)


def integer(name: str, argument: str, value: Any) -> int:
    """Returns an integer of at least 1.

    Raises:
      InputError: the value is something else.
    """
    if not is_integer(value) or value < 1:
        raise InputError(f"{name}: {argument} must be an integer of at least 1. Received: {value!r}.")
    return int(value)


def interval(name: str, argument: str, value: Sequence[float], most: float = float("inf")) -> tuple[float, float]:
    """Returns (smallest, largest), positive numbers.

    Raises:
      InputError: the value is something else.
    """
    both = tuple(value) if isinstance(value, list | tuple) else ()
    is_valid = len(both) == 2 and all(map(is_number, both))
    if not is_valid or not 0 < both[0] <= both[1] <= most or both[1] == float("inf"):
        limit = "" if most == float("inf") else f", at most {most}"
        raise InputError(f"{name}: {argument} must be (smallest, largest), positive{limit}. Received: {value!r}.")
    return float(both[0]), float(both[1])
