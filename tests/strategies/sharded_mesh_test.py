"""Models on a mesh with more complex layers than a weight and a call, whose parameters are sharded; tensors from outside."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.selection import quick
from tests.strategies.mesh_test import NEXT, TOKENS, trainer_of, values

RANDOM = np.random.default_rng(3)


@pytest.fixture
def sharded():
    return tfdist.load_strategy("mesh", mesh_shape="data:4", shard="parameters", shard_min_elements=1, environment={})


class Composite(keras.layers.Layer):
    """Has a weight and an inner layer, whose weights it also reads directly."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(8, activity_regularizer="l2", kernel_regularizer="l2", name="inner")

    def build(self, shape):
        self.scale = self.add_weight(shape=(8, 8), name="scale")
        self.inner.build(shape)

    def call(self, inputs):
        hidden = keras.ops.relu(self.inner(inputs) @ self.scale)
        return hidden @ keras.ops.transpose(self.inner.kernel)


class Tied(keras.layers.Layer):
    """Has a weight, and reads a weight of another layer that Keras does not track here."""

    def __init__(self, read):
        super().__init__()
        self.read = read

    def build(self, shape):
        self.bias = self.add_weight(shape=(8,), name="bias")

    def call(self, inputs):
        return inputs @ keras.ops.transpose(self.read()) + self.bias


def of_odd_layers():
    inputs = keras.Input((4, 8))
    recurrent = keras.layers.GRU(8, unroll=True, return_sequences=True)(inputs)
    shared = keras.layers.Dense(8, name="shared")
    hidden = shared(shared(keras.layers.Flatten()(recurrent)[:, :8]))
    tied = Tied(lambda: shared.kernel)(Composite()(hidden))
    return keras.Model(inputs, keras.layers.Dense(12)(tied))


@pytest.mark.parametrize(("which", "accumulate_steps"), [("none", 2), ("composite|dense", 1)])
def test_sharded_weights_that_more_than_their_layers_read(single, sharded, float64, which, accumulate_steps):
    """Weights of composite layers, cells, regularizers, tied layers and layers called twice; also with recomputation."""
    data = (RANDOM.standard_normal((16, 4, 8)), RANDOM.integers(0, 12, 16))

    def trained(strategy):
        keras.utils.clear_session(free_memory=False)
        options = {"optimizer": "sgd", "accumulate_steps": accumulate_steps}
        trainer = trainer_of(strategy, lambda: tfdist.recompute(of_odd_layers(), which), **options)
        trainer.fit(data, batch_size=8, steps=3)
        return values(trainer)

    expected, found = trained(single), trained(sharded)
    assert list(found) == list(expected)
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=1e-11, atol=1e-11, err_msg=path)


@pytest.mark.parametrize("bits", quick(["bfloat16", "float16"], "bfloat16"))
def test_mixed_precision(single, sharded, bits, precision):
    """Computed in 16 bits, stored and updated in 32: as close to one device as 16 bits allow."""
    data = (RANDOM.integers(0, 12, (16, 6)), RANDOM.integers(0, 12, (16, 6)))

    def trained(strategy):
        keras.utils.clear_session(free_memory=False)  # which also resets the policy
        precision(f"mixed_{bits}")
        with strategy.scope():
            trainer = trainer_of(strategy, optimizer=keras.optimizers.SGD(0.1))
        first, model = values(trainer), trainer.model
        last = trainer.fit(data, batch_size=8, steps=3, schedule=tfdist.Schedule(log_every=3)).last("train")
        assert {v.dtype for v in model.trainable_variables} == {"float32"}
        assert last.get("skipped_steps", 0) == 0
        assert model.get_layer("block_0_ffn_in").compute_dtype == bits
        return first, values(trainer)

    (first, expected), (_, found) = trained(single), trained(sharded)
    for path, value in expected.items():
        assert np.linalg.norm(found[path] - value) <= 0.01 * np.linalg.norm(value) + 0.002, path
    way = {path: np.linalg.norm(value - first[path]) for path, value in expected.items()}
    for path in ("block_0_ffn_in/kernel", "logits/kernel", "token_embedding/embeddings"):
        assert np.linalg.norm(found[path] - expected[path]) <= 0.1 * way[path], path


def test_rows_that_are_nan_leave_the_others_alone(single, sharded):
    rows = np.ones([8, 8], "float32")
    rows[0] = np.nan

    def outputs(strategy):
        keras.utils.set_random_seed(11)
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(4)])

        def forward(x):
            with strategy.layouts.compute_layouts(model.trainable_variables):
                return model(x)

        batch = next(strategy.distribute(lambda *_: tf.data.Dataset.from_tensors(rows)))
        return strategy.local(strategy.compiled(lambda x: strategy.run(forward, x))(batch))[0]

    np.testing.assert_allclose(outputs(sharded), outputs(single), rtol=1e-5)


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", tf.nn.softmax])
@pytest.mark.parametrize(("where", "which"), [("mesh4x1", "none"), ("sharded", "none"), ("single", "full")])
def test_losses_of_probabilities_are_those_of_their_logits(activation, where, which, single, request):
    """Keras computes such losses from the input of the activation, because gradients of saturated probabilities vanish."""
    classes = RANDOM.integers(0, 4, 16)
    data = 60 * RANDOM.standard_normal((16, 8)).astype("float32"), np.eye(4, dtype="float32")[classes]
    loss = keras.losses.BinaryCrossentropy if activation == "sigmoid" else keras.losses.CategoricalCrossentropy

    def trained(strategy, recomputed):
        keras.utils.set_random_seed(11)
        with strategy.scope():
            model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activation=activation)])
            trainer = tfdist.Trainer(
                tfdist.recompute(model, recomputed), optimizer=keras.optimizers.SGD(0.01), loss=loss()
            )
        return [
            trainer.fit(data, batch_size=8, steps=2, schedule=tfdist.Schedule(log_every=1)).last("train")["loss"]
            for _ in range(2)
        ]

    expected, found = trained(single, "none"), trained(request.getfixturevalue(where), which)
    assert found == pytest.approx(expected, rel=1e-4)


class Positions(keras.layers.Layer):
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
