"""Steps of a pipeline in one process that has all stages, and micro-steps on a mesh."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.selection import quick


class Drawing(keras.layers.Layer):
    """Draws a number in each forward pass."""

    def __init__(self, keep: Callable[[float], None]) -> None:
        super().__init__()
        self._keep = keep

    def call(self, x: tf.Tensor) -> tf.Tensor:
        def note(value: np.ndarray) -> np.ndarray:
            self._keep(float(value))
            return value

        value = tf.numpy_function(note, [tf.random.uniform([])], tf.float32)
        return x + 0.0 * tf.ensure_shape(value, [])

    def compute_output_spec(self, x: keras.KerasTensor) -> keras.KerasTensor:
        return keras.KerasTensor(x.shape, x.dtype)


def test_random_operations_without_a_generator_draw_by_micro_batch() -> None:
    """The passes of a stage are traced once: each call must draw other numbers, and the same in another run.

    Without masks, there is no further forward pass.
    """
    runs: list[list[float]] = [[], []]
    for drawn in runs:
        strategy = tfdist.load_strategy("pipeline", micro_batches=3)
        with strategy.scope():
            inputs = keras.Input((4,))
            model = keras.Model(inputs, keras.layers.Dense(1)(Drawing(drawn.append)(inputs)))
            trainer = tfdist.Trainer(model, optimizer="sgd", loss="mse", seed=5)
        trainer.fit(np.zeros((6, 4), "float32"), np.zeros((6, 1), "float32"), batch_size=6, steps=2, verbose=0)
    assert runs[0] == runs[1] and len(runs[0]) == len(set(runs[0])) == 6


RANDOM = np.random.default_rng(3)
X, Y = RANDOM.normal(size=(16, 6)), RANDOM.integers(0, 4, 16)
EQUAL = np.repeat(X[:1], 8, 0)  # moments do not depend on which rows a micro-step has


def trained(strategy: tfdist.Strategy, x: np.ndarray, layer: keras.Layer | None = None) -> tuple[Any, list[Any]]:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.BatchNormalization(name="norm")] if layer is None else [layer]
        model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = tfdist.Trainer(model, optimizer="sgd", loss=loss, metrics=["accuracy"], accumulate_steps=4)
    record = trainer.fit(x, Y[: len(x)], batch_size=8, steps=1).last("train")
    return record, [np.array(strategy.local(variable.value)[0]) for variable in model.variables]


@pytest.mark.parametrize("shard", quick(["none", "parameters"], "none"))
def test_metrics_and_statistics_of_all_micro_steps(shard: str, single: tfdist.Strategy, float64: None) -> None:
    strategy = tfdist.load_strategy("mesh", mesh_shape="data:2", shard=shard, shard_min_elements=1, environment={})
    for x, make in ((EQUAL, lambda: None), (X, lambda: keras.layers.Dense(8, activity_regularizer="l2"))):
        (expected, weights), (found, ours) = (trained(where, x, make()) for where in (single, strategy))
        assert found["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-9)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-9)
        for a, b in zip(ours, weights, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9)
