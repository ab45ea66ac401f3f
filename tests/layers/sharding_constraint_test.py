"""Layouts of activations; tests/conformance tests that results do not change."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import tfdist
from tfdist.config.layouts import Layout
from tfdist.errors import InputError

RANDOM = np.random.default_rng(2)
X, Y = RANDOM.standard_normal((16, 6, 4)).astype("float32"), RANDOM.integers(0, 4, (16, 6))
IMAGES = RANDOM.standard_normal((4, 8, 4, 6)).astype("float32")


def build(dims="batch sequence embed"):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6, 4))
    hidden = tfdist.constrain(keras.layers.Dense(4, name="first")(inputs), dims, "between")
    return keras.Model(inputs, keras.layers.Dense(4, name="last")(hidden))


def trained(strategy):
    with strategy.scope():
        model = build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = tfdist.Trainer(model, optimizer="sgd", loss=loss)
    trainer.fit((X, Y), batch_size=8, steps=3)
    return trainer


def assert_as_on_one_device(strategy, single):
    for a, b in zip(trained(single).model.get_weights(), trained(strategy).model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def mesh(shape, layout):
    return tfdist.load_strategy("mesh", mesh_shape=shape, layout=layout, environment={})


@pytest.fixture(scope="module")
def split():
    return mesh("data:2;model:2", "sequence:model")


def laid_out(strategy, function, value, *axes):
    """Returns a function's result on the mesh, as an array, and the axes over which it is sharded."""
    found = strategy.compiled(lambda x: strategy.run(function, x))(strategy.devices.place(value, Layout(axes)))
    specs = [None if spec == dtensor.UNSHARDED else spec for spec in dtensor.fetch_layout(found).sharding_specs]
    return strategy.devices.full_tensor(found).numpy(), specs


def test_without_a_mesh_it_is_the_identity(single, mirrored2):
    assert tfdist.constrain(value := tf.ones([2, 3]), "batch embed") is value
    assert_as_on_one_device(mirrored2, single)


def test_on_a_mesh_a_model_trains_as_on_one_device(split, single):
    assert_as_on_one_device(split, single)


@pytest.mark.parametrize(
    ("value", "dims", "given", "expected"),
    [
        (X, "batch sequence embed", ["data", None, None], ["data", "model", None]),
        (X[:5], "batch sequence embed", [None, None, None], [None, "model", None]),  # the axis does not divide the rows
        (IMAGES, "batch * sequence *", ["data", "model", None, None], ["data", None, "model", None]),
        (IMAGES, "batch * * sequence", ["data", "model", None, None], ["data", None, None, "model"]),
        (IMAGES, "* sequence * *", ["data", "model", None, None], [None, "model", None, None]),
    ],
)
def test_a_constraint_lays_out_and_changes_no_value(value, dims, given, expected, split):
    found, axes = laid_out(split, lambda x: tfdist.constrain(x if value.ndim == 3 else x * 1, dims), value, *given)
    np.testing.assert_array_equal(found, value)
    assert axes == expected


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (
            "batch embed",
            r"must name each dim of the tensor. Received: 'batch embed' for shape \(None, 6, 4\)",
        ),
        ("batch sequence sequence", "puts sequence and sequence of between on the axis model"),
        ("batch sequence batch", "puts batch and batch of between on the axis data"),
    ],
)
def test_refuses_before_anything_runs(split, dims, message):
    with pytest.raises(InputError, match=message), split.scope():
        build(dims)


def test_an_axis_must_divide_its_dim():
    message = "shards sequence of between over the 4 devices of model.*Received: .*of size 6"
    with pytest.raises(InputError, match=message), mesh("data:1;model:4", "sequence:model").scope():
        build()


def test_keras_alone_loads_it(split, tmp_path):
    trainer = trained(split)
    trainer.save(str(tmp_path / "model.keras"))
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for a, b in zip(trainer.model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert type(loaded.get_layer("between")) is keras.layers.Identity
    assert loaded.predict(X, verbose=0).shape == (16, 6, 4)


def test_a_mask_goes_along(split):
    inputs = keras.Input((6,), dtype="int32")
    hidden = tfdist.constrain(keras.layers.Embedding(9, 4, mask_zero=True)(inputs), "batch sequence embed")
    assert hidden._keras_mask is not None


def test_rules_without_effect_are_told(caplog):
    trained(mesh("data:2;model:2", "head:model"))
    assert "The rule head:model has no effect: no tensor of the model has a dim head." in caplog.text
    assert "Nothing is sharded over the axis model: its 2 devices do the same work." in caplog.text


def test_a_constraint_keeps_the_precision_of_its_tensor(precision):
    precision("mixed_bfloat16")
    inputs = keras.Input((6, 4))
    found = tfdist.constrain(keras.layers.Softmax(dtype="float32")(inputs), "batch sequence embed")
    assert found.dtype == "float32"
    assert keras.Model(inputs, found)(X).dtype == tf.float32


def test_it_is_checked_alone_outside_of_a_step(split):
    with split.scope():
        assert tfdist.constrain(tf.ones([4, 6, 4]), "batch sequence embed").shape == (4, 6, 4)
        inputs = keras.Input((None, 3, 4))

        class Four(keras.layers.Layer):
            def call(self, x):
                return tfdist.constrain(x, "batch sequence * *")

        assert Four()(inputs).shape == (None, None, 3, 4)


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        (lambda: keras.layers.GroupQueryAttention(2, 4, 2), {"use_causal_mask": True}),
        (lambda: keras.layers.MultiHeadAttention(2, 4), {"use_causal_mask": True, "return_attention_scores": True}),
        (lambda: keras.layers.MultiHeadAttention(2, 4, dropout=1e-9), {"use_causal_mask": True}),
    ],
    ids=["grouped", "with scores", "with dropout"],
)
def test_any_attention_is_split_over_the_context(single, attention, options):
    losses = []
    for strategy in (single, mesh("data:2;context:2", "context:context")):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            inputs = keras.Input((6, 4))
            hidden = keras.layers.LayerNormalization()(keras.layers.Dense(4)(inputs))
            outputs = keras.tree.flatten(attention()(hidden, hidden, **options))[0]
            model = keras.Model(inputs, keras.layers.Dense(4)(outputs))
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            trainer = tfdist.Trainer(model, optimizer="sgd", loss=loss)
        losses.append(trainer.fit((X, Y), batch_size=8, steps=3).last("train")["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
