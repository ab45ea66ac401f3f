"""Makes names unique."""

import re
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def unique_names(entries: Iterable[tuple[str, T]], mark: str = "#") -> dict[str, T]:
    """Returns values by name, in order; duplicates get `mark` and a number, as in `dense/kernel#2`."""
    found: dict[str, T] = {}
    for wanted, value in entries:
        name, count = wanted, 1
        while name in found:
            count += 1
            name = f"{wanted}{mark}{count}"
        found[name] = value
    return found


def without_mark(name: str) -> str:
    """Returns the name that was wanted for a value of `unique_names`, as `dense/kernel` for `dense/kernel#2`."""
    return re.sub(r"#\d+$", "", name)
