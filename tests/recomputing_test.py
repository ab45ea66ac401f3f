import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.recomputing import recompute

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
    return {v.path: np.array(strategy.local(v.value)[0]) for v in trainer.model.variables}


@pytest.mark.parametrize("which", ["full", "block_._attention", "drop.*|block_0_ffn_in|block_1_attention_dropout"])
def test_the_result_is_the_same_with_dropout_too(single, float64, which):
    expected, found = (trained(single, given) for given in ("none", which))
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=1e-11, atol=1e-11, err_msg=path)


@pytest.mark.parametrize("which", ["full", "norm|drop"])
def test_state_moves_once(single, mirrored2, float64, which):
    """Moving statistics, and the seeds of dropout."""
    data = (RANDOM.standard_normal((32, 6)), NEXT[:, 0])
    for strategy in (single, mirrored2):
        expected, found = (trained(strategy, given, normalized, data) for given in ("none", which))
        for path, value in expected.items():
            np.testing.assert_allclose(found[path], value, rtol=1e-11, atol=1e-11, err_msg=path)


def test_on_a_mesh(mesh2x2, float64):
    def build():
        return tfdist.models.transformer(input_shape=(6,), classes=12, layers=1, width=8, heads=2)

    expected, found = (trained(mesh2x2, which, build) for which in ("none", "full"))
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=1e-11, atol=1e-11, err_msg=path)


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
