"""Reversed dims on a mesh: flips, slices with negative strides, bidirectional layers and metrics as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.sharding.layouts import Layout

VALUE = np.random.default_rng(4).standard_normal((4, 8, 6))
REVERSED = {
    "tf.reverse of rows": lambda x: tf.reverse(x, [0]),
    "tf.reverse of two dims": lambda x: tf.reverse(x, [1, -1]),
    "keras.ops.flip": lambda x: keras.ops.flip(x, 1),
    "keras.ops.flip of all dims": keras.ops.flip,
    "tf.image.flip_left_right": lambda x: tf.image.flip_left_right(x[..., tf.newaxis])[..., 0],
    "a slice": lambda x: x[:, ::-1],
    "every other": lambda x: x[::-2, :, 1::2],
    "behind an ellipsis": lambda x: x[..., ::-1],
    "an ellipsis of no dims": lambda x: x[..., ::-1, :, :],
    "a new dim": lambda x: x[tf.newaxis, :, ::-1, :][0],
    "one of a dim": lambda x: x[1, ::-1],
    "nothing": lambda x: tf.reverse(x, []),
}


@pytest.mark.parametrize("case", REVERSED)
def test_values_and_gradients(case, mesh2x2):
    layouts, devices, function = mesh2x2.layouts, mesh2x2.devices, REVERSED[case]
    with tf.GradientTape() as tape:
        x = tf.constant(VALUE)
        tape.watch(x)
        expected = function(x * x)
        weights = tf.reshape(tf.range(tf.size(expected, tf.int64), dtype=tf.float64), expected.shape)
        loss = tf.reduce_sum(expected * weights)
    gradient = tape.gradient(loss, x)
    axes = ("data", "model", None)[: len(expected.shape)]

    @tf.function(autograph=False)
    def compute(x, weights):
        with layouts.tracing(), tf.GradientTape() as tape:
            tape.watch(x)
            found = devices.relaid(function(x * x), Layout(axes))  # as a layer that requires it
            loss = tf.reduce_sum(found * weights)
        return found, tape.gradient(loss, x)

    for laid in (("data", "model", None), ("data", None, "model"), (None, None, None)):
        computed = compute(devices.lay(VALUE, Layout(laid)), devices.lay(weights, Layout(axes)))
        for found, right in zip(computed, (expected, gradient), strict=True):
            np.testing.assert_array_equal(devices.full_tensor(found), right, err_msg=f"{laid}")


def test_nothing_is_replaced_afterwards(mesh2x2):
    reverse = tf.reverse
    with pytest.raises(KeyError), mesh2x2.layouts.tracing():
        assert tf.reverse is not reverse
        raise KeyError
    assert tf.reverse is reverse and "ReverseV2" in str(
        tf.function(lambda x: keras.ops.flip(x)).get_concrete_function(tf.TensorSpec([3])).graph.as_graph_def()
    )


def network():
    inputs = keras.Input((6, 6, 1))
    images = keras.layers.RandomFlip("horizontal", seed=1)(inputs)
    texts = keras.layers.Reshape((6, 6))(images)
    hidden = keras.layers.Bidirectional(keras.layers.LSTM(4, return_sequences=True, unroll=True))(texts)
    hidden = keras.layers.LSTM(4, go_backwards=True, unroll=True)(hidden)
    hidden = keras.layers.Lambda(lambda x: x[:, ::-1])(keras.layers.Dense(8, activation="relu")(hidden))
    return keras.Model(inputs, keras.layers.Dense(2, activation="sigmoid")(hidden))


def test_a_model_trains_and_is_evaluated_as_on_one_device(single, mesh2x2, mesh4x1, float64):
    random = np.random.default_rng(2)
    data = random.standard_normal((16, 6, 6, 1)), random.integers(0, 2, (16, 2))
    found = []
    for strategy in (single, mesh2x2, mesh4x1):
        keras.utils.clear_session(free_memory=False)  # for equal names
        keras.utils.set_random_seed(11)
        with strategy.scope():
            metrics = [
                keras.metrics.AUC(),
                keras.metrics.AUC(curve="PR", name="pr"),
                keras.metrics.F1Score(threshold=0.5),
            ]
            trainer = tfdist.Trainer(network(), optimizer="adam", loss="binary_crossentropy", metrics=metrics)
        trainer.fit(data, batch_size=8, steps=4)
        weights = {v.path: np.array(trainer.strategy.local(v.value)[0]) for v in trainer.model.variables}
        found.append((weights, trainer.evaluate(data, batch_size=8)))
    (weights, results), *others = found
    assert {"auc", "pr", "f1_score_1"} <= results.keys()
    for other_weights, other_results in others:
        for name, value in weights.items():
            np.testing.assert_allclose(other_weights[name], value, rtol=1e-9, atol=1e-12, err_msg=name)
        for name, result in results.items():
            np.testing.assert_allclose(other_results[name], result, rtol=1e-9, err_msg=name)
