"""A training step of a pipeline, in one process that has all stages."""

import keras
import numpy as np
import tensorflow as tf

import tfdist


def test_without_masks_there_is_no_further_forward_pass() -> None:
    calls = []

    class Counting(keras.layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            def count(value: np.ndarray) -> np.ndarray:
                calls.append(len(value))
                return value

            return tf.ensure_shape(tf.numpy_function(count, [x], x.dtype), x.shape)

        def compute_output_spec(self, x: keras.KerasTensor) -> keras.KerasTensor:
            return keras.KerasTensor(x.shape, x.dtype)

    strategy = tfdist.load_strategy("pipeline", micro_batches=2)
    x = np.zeros((8, 4), "float32")
    with strategy.scope():
        inputs = keras.Input((4,))
        model = keras.Model(inputs, keras.layers.Dense(1)(Counting()(inputs)))
        trainer = tfdist.Trainer(model, optimizer="sgd", loss="mse")
    trainer.fit(x, x[:, :1], batch_size=8, steps=3, verbose=0)
    assert calls == 2 * 3 * [4]


def test_random_operations_without_a_generator_draw_by_micro_batch() -> None:
    """The passes of a stage are traced once: each call must draw other numbers, and the same in another run."""
    drawn: list[float] = []

    class Drawing(keras.layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            def note(value: np.ndarray) -> np.ndarray:
                drawn.append(float(value))
                return value

            value = tf.numpy_function(note, [tf.random.uniform([])], tf.float32)
            return x + 0.0 * tf.ensure_shape(value, [])

        def compute_output_spec(self, x: keras.KerasTensor) -> keras.KerasTensor:
            return keras.KerasTensor(x.shape, x.dtype)

    for _ in range(2):
        strategy = tfdist.load_strategy("pipeline", micro_batches=3)
        with strategy.scope():
            inputs = keras.Input((4,))
            model = keras.Model(inputs, keras.layers.Dense(1)(Drawing()(inputs)))
            trainer = tfdist.Trainer(model, optimizer="sgd", loss="mse", seed=5)
        trainer.fit(np.zeros((6, 4), "float32"), np.zeros((6, 1), "float32"), batch_size=6, steps=2, verbose=0)
    assert drawn[:6] == drawn[6:] and len(set(drawn)) == 6
