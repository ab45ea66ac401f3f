"""Names of their own for things that may share one."""

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def unique_names(entries: Iterable[tuple[str, T]], mark: str = "#") -> dict[str, T]:
    """Values by name, in their order; the second of a name gets `mark` and its number, as in `dense/kernel#2`."""
    found: dict[str, T] = {}
    for wanted, value in entries:
        name, count = wanted, 1
        while name in found:
            count += 1
            name = f"{wanted}{mark}{count}"
        found[name] = value
    return found
