"""Selects the parameters of a test that `make test` runs; `make conformance` runs the others."""

from collections.abc import Iterable
from typing import Any

import pytest


def quick(values: Iterable[Any], *chosen: Any) -> list[Any]:
    """Returns parameters for `pytest.mark.parametrize`: the chosen values, and the others marked as `full`."""
    return [value if value in chosen else pytest.param(value, marks=pytest.mark.full) for value in values]
