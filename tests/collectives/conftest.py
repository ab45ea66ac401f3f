"""Ways to run a replica function on the logical devices of the test process."""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tfdist.distribution.strategy import Strategy

Run = Callable[..., list[Any]]


def _called(strategy: Strategy, function: Callable[[Any], Any]) -> list[Any]:
    """Returns each replica's structure of tensors of a function of the collectives."""
    result = strategy.run(lambda: function(strategy.collectives))
    flat = [strategy.local(tensor) for tensor in tf.nest.flatten(result)]
    return [tf.nest.pack_sequence_as(result, list(values)) for values in zip(*flat, strict=True)]


def _arrays(tensors: Any) -> Any:
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), tensors)


@pytest.fixture(params=["eager", "graph"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a function of a strategy's collectives on each replica; returns each replica's structure of arrays."""
    if request.param == "eager":
        return lambda *given: _arrays(_called(*given))
    return lambda *given: _arrays(tf.function(lambda: _called(*given), autograph=False)())


@pytest.fixture
def compiled() -> Run:
    """Runs a function in a graph as `run` does, but twice; returns the second results."""

    def call(strategy: Strategy, function: Callable[[Any], Any]) -> list[Any]:
        program = tf.function(lambda: _called(strategy, function), autograph=False)
        program()
        return _arrays(program())

    return call


@pytest.fixture(params=["single", "mirrored2", "mirrored4"])
def strategy(request: pytest.FixtureRequest) -> Strategy:
    """Strategies with one, two and four replicas."""
    return request.getfixturevalue(request.param)
