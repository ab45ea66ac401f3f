import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.layers.recompute import recompute

RANDOM = np.random.default_rng(5)
TOKENS, NEXT = (RANDOM.integers(0, 12, (32, 6)).astype("int32") for _ in range(2))


def transformer():
    return tfdist.models.transformer(input_shape=(6,), classes=12, layers=2, width=8, heads=2, dropout=0.2)


def normalized():
    inputs = keras.Input((6,))
    hidden = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(8, name="first")(inputs))
    return keras.Model(inputs, keras.layers.Dense(12, name="last")(keras.layers.Dropout(0.5, name="drop")(hidden)))


def trained(strategy, which, build=transformer, data=(TOKENS, NEXT)):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(2)
    with strategy.scope():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = tfdist.Trainer(recompute(build(), which), optimizer=keras.optimizers.Adam(0.01), loss=loss, seed=4)
    trainer.fit(data, batch_size=8, steps=6)
    metrics = keras_internals.metrics_of(trainer.model)
    kept = [*trainer.model.variables, *(v for metric in metrics for v in metric.variables)]
    return {v.path: np.array(strategy.local(v.value)[0]) for v in kept}


def dense():
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    return keras.Model(inputs, keras.layers.Dense(12)(keras.layers.Dropout(0.5)(hidden)))


def block():
    return tfdist.models.transformer(input_shape=(6,), classes=12, layers=1, width=8, heads=2, dropout=0.2)


class Block(keras.layers.Layer):
    """Its `call` has no `training` argument: dropout gets it from the call context."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense, self.dropout = keras.layers.Dense(6), keras.layers.Dropout(0.5)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        return self.dropout(self.dense(inputs))


def of_blocks():
    inputs = keras.Input((6,))
    return keras.Model(inputs, keras.layers.Dense(12)(Block(name="second")(Block(name="first")(inputs))))


def of_a_masked_sequence():
    inner = keras.Sequential(
        [keras.Input((6,)), keras.layers.Embedding(12, 4, mask_zero=True), keras.layers.LSTM(5, return_sequences=True)]
    )
    inputs = keras.Input((6,), dtype="int32")
    return keras.Model(inputs, keras.layers.Dense(12)(inner(inputs)))


def unbuilt():
    return keras.Sequential([keras.layers.Dense(8, activation="gelu"), keras.layers.Dense(12)])


def of_losses_inside():
    inputs = keras.Input((6,))
    regularized = keras.layers.Dense(6, activity_regularizer=keras.regularizers.L2(3.0))
    inner = keras.Sequential([keras.Input((6,)), regularized], name="inner")
    return keras.Model(inputs, keras.layers.Dense(12, kernel_regularizer="l2")(inner(inputs)))


def of_experts():
    return tfdist.models.transformer(input_shape=(6,), classes=12, layers=2, width=8, heads=2, experts=4)


ROWS = (RANDOM.standard_normal((32, 6)), NEXT[:, 0])
WORDS = (TOKENS, NEXT)
FULL = pytest.mark.full


def assert_equal(found, expected, name=""):
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=1e-11, atol=1e-11, err_msg=f"{name} {path}")


@pytest.mark.parametrize(
    ("strategy", "build", "data", "which"),
    [
        ("single", transformer, WORDS, "full"),  # with dropout
        pytest.param("single", transformer, WORDS, "block_._attention", marks=FULL),
        pytest.param("single", transformer, WORDS, "drop.*|block_0_ffn_in|block_1_attention_dropout", marks=FULL),
        # Moving statistics and dropout seeds are only updated once.
        *((name, normalized, ROWS, which) for name in ("single", "mirrored2") for which in ("full", "norm|drop")),
        # With dropout on a mesh, whose random numbers must only be drawn once.
        ("mesh2x2", dense, ROWS, "full"),
        pytest.param("mesh2x2", block, WORDS, "full", marks=FULL),
        # Layers of layers, masks, and models that are built later.
        ("single", of_blocks, ROWS, "full"),
        ("single", of_a_masked_sequence, WORDS, "full"),
        ("single", unbuilt, ROWS, "full"),
        # Losses and metrics inside count once.
        ("single", of_losses_inside, ROWS, "full"),
        ("single", of_experts, WORDS, "full"),
    ],
)
def test_the_result_is_the_same(strategy, build, data, which, float64, request):
    expected, found = (trained(request.getfixturevalue(strategy), given, build, data) for given in ("none", which))
    assert list(found) == list(expected)
    assert_equal(found, expected)


def residual():
    inputs = keras.Input((6, 8))
    hidden = keras.layers.Dropout(0.3)(keras.layers.Dense(16, activation="relu")(inputs))
    hidden = keras.layers.Add()([inputs, keras.layers.Dense(8)(hidden)])
    return keras.Model(inputs, keras.layers.Dense(12)(keras.layers.Flatten()(hidden)))


def test_masks_on_a_mesh_are_those_of_one_device_in_every_layout(single, float64):
    """DTensor would draw other numbers where the backward pass requires another layout."""
    data = (RANDOM.standard_normal((32, 6, 8)), NEXT[:, 0])
    found = {}
    for layout in ("", "out:model"):
        options = {"devices": 4, "mesh_shape": "data:2;model:2", "shard_min_elements": 1}
        strategy = tfdist.load_strategy("mesh", layout=layout, environment={}, **options)
        found |= {(layout, which): trained(strategy, which, residual, data) for which in ("none", "full")}
    expected = trained(single, "none", residual, data)
    for key, variables in found.items():
        assert_equal(variables, expected, key)


def softmaxes(model):
    @tf.function(autograph=False)
    def gradients(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True))
        return [tf.convert_to_tensor(g) for g in tape.gradient(loss, [v.value for v in model.trainable_variables])]

    graph = gradients.get_concrete_function(tf.constant(TOKENS[:4])).graph
    return sum(operation.type == "Softmax" for operation in keras_internals.operations_of(graph))


def test_what_is_named_is_computed_once_more():
    assert softmaxes(transformer()) == 2
    assert softmaxes(recompute(transformer(), "block_.*_attention")) == 4


@pytest.mark.parametrize(
    ("which", "message"), [("(", "a regular expression. Received: '('"), ("attn", "Received: 'attn', with")]
)
def test_refuses(which, message):
    with pytest.raises(InputError) as raised:
        recompute(transformer(), which)
    assert message in str(raised.value)


def test_frozen_weights_keep_every_bit_in_mixed_precision(single, precision):
    def build():
        model = normalized()
        model.get_layer("first").trainable = False
        return model

    precision("mixed_bfloat16")
    data = (RANDOM.standard_normal((32, 6)).astype("float32"), NEXT[:, 0])
    expected, found = (trained(single, which, build, data) for which in ("none", "full"))
    np.testing.assert_array_equal(found["first/kernel"], expected["first/kernel"])
    np.testing.assert_allclose(found["last/kernel"], expected["last/kernel"], atol=0.02)
