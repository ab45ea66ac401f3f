"""Represents sizes as monomials in the number of rows of a batch and in other unknown dims.

In a traced function with an unknown batch size, shapes, divisors and axes depend on such sizes. `COUNT` stands for the number
of rows of a replica, which is at least 1.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable
from fractions import Fraction
from typing import Any

import numpy as np

_ROWS = ""  # the symbol of COUNT
_POSITIVE = "+"  # first letter of other symbols that cannot be 0
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Size:
    """A coefficient times powers of symbols that stand for nonnegative integers."""

    coefficient: Fraction = Fraction(1)
    powers: tuple[tuple[str, int], ...] = ()  # sorted pairs (symbol, nonzero power)

    @property
    def power(self) -> int:
        """The power of COUNT."""
        return self.powers[0][1] if self.powers and self.powers[0][0] == _ROWS else 0  # the first in order

    @property
    def is_known(self) -> bool:
        """Whether it is a number, without symbols."""
        return not self.powers

    @property
    def is_integer(self) -> bool:
        """Whether it is an integer for all values of its symbols."""
        return self.coefficient.denominator == 1 and all(power > 0 for _, power in self.powers)

    @property
    def is_positive(self) -> bool:
        """Whether it is positive for all values of its symbols."""
        return self.coefficient > 0 and all(symbol[:1] in (_ROWS, _POSITIVE) for symbol, _ in self.powers)

    def __int__(self) -> int:
        if self.powers or self.coefficient.denominator != 1:
            raise ValueError(f"{self} is not a known integer")
        return int(self.coefficient)

    def __mul__(self, other: "Size") -> "Size":
        sums, coefficient = dict(self.powers), self.coefficient * other.coefficient
        for symbol, power in other.powers:
            sums[symbol] = sums.get(symbol, 0) + power
        powers = sorted((symbol, power) for symbol, power in sums.items() if power and coefficient)
        return Size(coefficient, tuple(powers))

    def __neg__(self) -> "Size":
        return Size(-self.coefficient, self.powers)

    def __add__(self, other: "Size") -> "Size | None":
        if not self.coefficient or not other.coefficient:
            return self if self.coefficient else other
        if self.powers != other.powers:
            return None
        coefficient = self.coefficient + other.coefficient
        return Size(coefficient, self.powers if coefficient else ())

    def divided_by(self, other: "Size") -> "Size | None":
        """Returns the quotient; None if `other` is 0."""
        if not other.coefficient:
            return None
        inverse = Size(1 / other.coefficient, tuple((symbol, -power) for symbol, power in other.powers))
        return self * inverse

    def __str__(self) -> str:
        symbols = [f"{symbol or 'COUNT'}{'' if power == 1 else f'^{power}'}" for symbol, power in self.powers]
        return "*".join(([] if symbols and self.coefficient == 1 else [str(self.coefficient)]) + symbols)


ONE = Size()
COUNT = Size(Fraction(1), ((_ROWS, 1),))


def size(value: Any) -> Size | None:
    """Converts a number to a size; returns None if it is not finite."""
    return Size(Fraction(value)) if math.isfinite(value) else None


def symbol(name: str, *, is_positive: bool = False) -> Size:
    """Returns a new unknown dim, equal on all replicas. In a loop, it may stand for a different number in each iteration."""
    return Size(Fraction(1), ((f"{_POSITIVE * is_positive}{name}#{next(_numbers)}", 1),))


def shorten(dim: Size, count: int) -> Size:
    """Returns `dim` minus `count`; equal dims with equal counts have equal results."""
    return Size(Fraction(1), ((f"({dim})-{count}", 1),)) if count else dim


def product(sizes: Iterable[Size | None]) -> Size | None:
    """Returns the product; None if a factor is unknown."""
    total = ONE
    for factor in sizes:
        if factor is None:
            return None
        total *= factor
    return total


def array(values: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Returns an object array of `values`, which are sizes or None, in row-major order."""
    values = list(values)
    result = np.empty(len(values), object)
    result[:] = values
    return result if shape is None else result.reshape(shape)
