"""A strategy that tests of steps share."""

import pytest

import tfdist


@pytest.fixture(scope="session")
def mirrored3() -> "tfdist.Strategy":
    """A strategy with three replicas in this process."""
    return tfdist.load_strategy("mirrored", devices=3, environment={})
