"""Models on a mesh that use tensors created outside of their layers' calls."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.mesh_test import NEXT, TOKENS, trainer_of, values


class Positions(keras.layers.Layer):
    """Adds a table that it has created as an ordinary tensor."""

    def __init__(self):
        super().__init__()
        self.table = tf.constant(np.random.default_rng(0).normal(size=(6, 32)).astype("float32"))

    def call(self, x):
        return x + self.table


def with_tensors_from_outside():
    """Returns a model with tensors that are computed while it is created: a small one and a large one."""
    inputs = keras.Input((6,), dtype="int32")
    embedded = keras.layers.Embedding(12, 32)(inputs) + keras.layers.Embedding(6, 32)(keras.ops.arange(6))
    factors = keras.ops.ones((32,)) * 0.5
    return keras.Model(inputs, keras.layers.Dense(12)(Positions()(embedded) * factors))


@pytest.mark.parametrize("strategy", ["mesh2x2", "mesh4x1"])
def test_a_model_that_uses_tensors_from_outside(strategy, single, request):
    expected, found = (
        trainer_of(where, with_tensors_from_outside, optimizer="sgd")
        for where in (single, request.getfixturevalue(strategy))
    )
    for trainer in (expected, found):
        trainer.fit((TOKENS, NEXT), batch_size=32, epochs=2)
    for (path, value), ours in zip(values(expected).items(), values(found).values(), strict=True):
        np.testing.assert_allclose(ours, value, rtol=2e-5, atol=1e-6, err_msg=path)
