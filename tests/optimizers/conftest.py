"""Variables of many shapes, gradients for several steps, and a function that applies them on every replica."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.distribution.strategy import Strategy

SHAPES = {"kernel": (4, 5), "conv": (2, 2, 3, 4), "cube": (2, 3, 4), "vector": (3,), "scalar": (), "bias": (5,)}
STEPS = 10
Arrays = dict[str, np.ndarray]


@pytest.fixture
def starts() -> Arrays:
    """Initial values of the variables, by path."""
    random = np.random.default_rng(0)
    return {path: random.standard_normal(shape) for path, shape in SHAPES.items()}


@pytest.fixture
def gradients() -> list[Arrays]:
    """The gradients of all variables for each step; that of the vector is zero at first."""
    random = np.random.default_rng(1)
    made = [{path: random.standard_normal(shape) for path, shape in SHAPES.items()} for _ in range(STEPS)]
    made[0]["vector"] = np.zeros(3)
    return made


@pytest.fixture
def train(starts: Arrays, gradients: list[Arrays]) -> Callable[[Strategy, Callable[[], keras.Optimizer]], Arrays]:
    """Applies the gradients in replica functions of a strategy; returns the variables, equal on every replica."""

    def train(strategy: Strategy, make: Callable[[], keras.Optimizer]) -> Arrays:
        with strategy.scope():
            variables = [keras.Variable(value, name=path) for path, value in starts.items()]
            optimizer = make()
            optimizer.build(variables)

        @tf.function(autograph=False)
        def step(*whole: tf.Tensor) -> None:
            strategy.run(lambda *mine: strategy.apply(optimizer, mine, variables), *whole)

        for gradient in gradients:
            step(*[tf.constant(gradient[v.path], v.dtype) for v in variables])
        replicas = {v.path: [np.asarray(value) for value in strategy.local(v.value)] for v in variables}
        for path, values in replicas.items():
            for value in values[1:]:
                np.testing.assert_array_equal(value, values[0], path)
        return {path: values[0] for path, values in replicas.items()}

    return train
