"""The strategy of most tests of exchanges."""

import pytest

import tfdist


@pytest.fixture
def mirrored3(float64: None) -> "tfdist.Strategy":
    """Three replicas, which compute in float64."""
    return tfdist.load_strategy("mirrored", devices=3)
