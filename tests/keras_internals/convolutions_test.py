"""Convolutions of tensors without rows."""

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist import keras_internals

LAYERS: dict[str, Any] = {
    "conv": lambda: keras.layers.Conv2D(4, 3, dilation_rate=2),
    "depthwise_conv": lambda: keras.layers.DepthwiseConv2D(3),
    "separable_conv": lambda: keras.layers.SeparableConv2D(4, 3),
    "conv_transpose": lambda: keras.layers.Conv2DTranspose(4, 3),
}


def outputs_and_gradients(layer: keras.Layer, rows: int, supported: bool) -> Any:
    @tf.function(input_signature=[tf.TensorSpec([None, 9, 8, 3])], autograph=False)
    def run(x: tf.Tensor) -> Any:
        with keras_internals.convolutions_of_no_rows(supported), tf.GradientTape() as tape:
            outputs = layer(x)
            total = tf.reduce_sum(tf.square(outputs))
        return outputs, tape.gradient(total, [weight.value for weight in layer.trainable_weights])

    return run(np.random.default_rng(0).normal(size=(rows, 9, 8, 3)).astype("float32"))


@pytest.mark.parametrize("name", LAYERS)
def test_they_return_no_rows_and_zero_gradients(name: str) -> None:
    layer = LAYERS[name]()
    shape = layer(np.zeros((1, 9, 8, 3), "float32")).shape[1:]
    outputs, gradients = outputs_and_gradients(layer, 0, supported=True)
    assert outputs.shape == (0, *shape)
    assert len(gradients) == len(layer.trainable_weights)
    assert not any(np.any(gradient) for gradient in gradients)


@pytest.mark.parametrize("name", LAYERS)
def test_with_rows_nothing_changes(name: str) -> None:
    layer = LAYERS[name]()
    layer(np.zeros((1, 9, 8, 3), "float32"))
    ours, plain = (outputs_and_gradients(layer, 2, supported) for supported in (True, False))
    for a, b in zip(tf.nest.flatten(ours), tf.nest.flatten(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)  # fused differently


def test_tensorflow_itself_does_not_support_them() -> None:
    """Guards: TensorFlow's gradient of a convolution without rows fails. What depends on it: `convolutions_of_no_rows`."""
    layer = keras.layers.Conv2D(4, 3)
    layer(np.zeros((1, 9, 8, 3), "float32"))
    with pytest.raises(tf.errors.InternalError, match="Missing 1-th output"):
        outputs_and_gradients(layer, 0, supported=False)
