"""Parameters in parts on a mesh, in models whose layers do not just have a weight and a call."""

import keras
import numpy as np
import pytest

import tfdist

RANDOM = np.random.default_rng(3)


class Composite(keras.layers.Layer):
    """Has a weight of its own and a layer, and reads another layer's weights."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(8, activity_regularizer="l2", kernel_regularizer="l2", name="inner")

    def build(self, shape):
        self.scale = self.add_weight(shape=(8, 8), name="scale")
        self.inner.build(shape)

    def call(self, inputs):
        hidden = keras.ops.relu(self.inner(inputs) @ self.scale)
        return hidden @ keras.ops.transpose(self.inner.kernel)


def of_odd_layers():
    inputs = keras.Input((4, 8))
    recurrent = keras.layers.GRU(8, unroll=True, return_sequences=True)(inputs)
    return keras.Model(inputs, keras.layers.Dense(12)(Composite()(keras.layers.Flatten()(recurrent)[:, :8])))


@pytest.mark.parametrize("which", ["none", "full"])
def test_sharded_weights_that_more_than_their_layers_read(single, float64, which):
    """Weights of composites, cells, regularizers and ties; and with recomputation beside."""
    sharded = tfdist.load_strategy(
        "mesh", mesh_shape="data:4", shard="parameters", shard_min_elements=1, environment={}
    )
    data = (RANDOM.standard_normal((16, 4, 8)), RANDOM.integers(0, 12, 16))

    def trained(strategy):
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(11)
        with strategy.scope():
            model = tfdist.recompute(of_odd_layers(), which)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            trainer = tfdist.Trainer(model, optimizer="sgd", loss=loss)
        trainer.fit(data, batch_size=8, steps=3)
        return {v.path: np.array(strategy.local(v.value)[0]) for v in model.variables}

    expected, found = trained(single), trained(sharded)
    assert list(found) == list(expected)
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=1e-11, atol=1e-11, err_msg=path)
