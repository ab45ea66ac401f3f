"""Convolutions and maximum pooling of tensors without rows, which TensorFlow does not support."""

import signal
import subprocess
import sys
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
    "max_pool": lambda: pooled(keras.layers.MaxPooling2D(2)),
    "adaptive_max_pool": lambda: pooled(keras.layers.AdaptiveMaxPooling2D(3)),
    "own_max_pool": lambda: pooled(
        keras.layers.Lambda(lambda x: tf.nn.max_pool2d(input=x, ksize=2, strides=2, padding="SAME"))
    ),
}


def pooled(pool: keras.layers.Layer) -> keras.Sequential:
    """Returns a layer with weights before the pooling, without which it would have no gradient."""
    return keras.Sequential([keras.layers.Dense(3), pool])


def outputs_and_gradients(layer: keras.Layer, rows: int, supported: bool) -> Any:
    @tf.function(input_signature=[tf.TensorSpec([None, 9, 8, 3])], autograph=False)
    def run(x: tf.Tensor) -> Any:
        with keras_internals.empty_batches_supported(supported), tf.GradientTape() as tape:
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
    """Guards: TensorFlow's gradient of a convolution without rows fails. What depends on it: `empty_batches_supported`."""
    layer = keras.layers.Conv2D(4, 3)
    layer(np.zeros((1, 9, 8, 3), "float32"))
    with pytest.raises(tf.errors.InternalError, match="Missing 1-th output"):
        outputs_and_gradients(layer, 0, supported=False)


def test_gradient_of_maximum_pooling_ends_the_process() -> None:
    """Guards: TensorFlow aborts in this gradient without rows. What depends on it: `empty_batches_supported`."""
    program = """
import tensorflow as tf

@tf.function(input_signature=[tf.TensorSpec([None, 8, 8, 1])])
def gradient(x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(tf.nn.max_pool2d(x, 2, 2, "SAME"))
    return tape.gradient(total, x)

gradient(tf.zeros([0, 8, 8, 1]))
"""
    ended = subprocess.run([sys.executable, "-c", program], stdin=subprocess.DEVNULL, capture_output=True, timeout=120)
    assert ended.returncode == -signal.SIGABRT
    assert b"int32 expected, got float" in ended.stderr
