"""Ways to run a replica function on the logical devices of the test process."""

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from tfdist.distribution.strategy import HasCollectives

Run = Callable[..., list[Any]]


@pytest.fixture(params=["eager", "graph"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a function of a strategy's collectives on each replica; returns each replica's structure of arrays."""

    def call(strategy: HasCollectives, function: Callable[[Any], Any]) -> list[Any]:
        def step() -> list[Any]:
            result = strategy.run(lambda: function(strategy.collectives))
            flat = [strategy.local(tensor) for tensor in tf.nest.flatten(result)]
            return [tf.nest.pack_sequence_as(result, list(values)) for values in zip(*flat, strict=True)]

        made = step() if request.param == "eager" else tf.function(step, autograph=False)()
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), made)

    return call


@pytest.fixture(params=["single", "mirrored2", "mirrored4"])
def strategy(request: pytest.FixtureRequest) -> HasCollectives:
    """Strategies with one, two and four replicas."""
    return request.getfixturevalue(request.param)
