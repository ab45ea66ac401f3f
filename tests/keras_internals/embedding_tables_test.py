"""Private APIs of Keras and TensorFlow for embeddings: lookups, and the counter of stateless random numbers."""

import keras
import numpy as np
import pytest

from tfdist import keras_internals

INITIALIZERS = {
    "uniform": lambda: keras.initializers.RandomUniform(seed=5),
    "without a seed": lambda: "uniform",
    "normal": lambda: keras.initializers.RandomNormal(mean=1.0, seed=5),
    "truncated": lambda: keras.initializers.TruncatedNormal(seed=5),
    "scaled": lambda: keras.initializers.GlorotUniform(seed=5),
    "scaled, truncated": lambda: keras.initializers.HeNormal(seed=5),
    "scaled, not truncated": lambda: keras.initializers.VarianceScaling(distribution="untruncated_normal", seed=5),
    "zeros": lambda: "zeros",
    "constant": lambda: keras.initializers.Constant(2.5),
}


def table(initializer, dtype="float32"):
    with keras_internals.deferred_weights():
        layer = keras.layers.Embedding(100, 7, embeddings_initializer=initializer, dtype=dtype)
        layer.build()
    return layer.weights[0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", INITIALIZERS)
def test_rows_are_drawn_without_the_others(name, dtype):
    variable = table(INITIALIZERS[name](), dtype)
    initializer = keras_internals.rows_initializer(variable)
    expected = keras_internals.initial_value(variable).numpy()
    for begin, end in ((0, 12), (40, 60), (96, 100)):
        rows = keras_internals.initial_rows(initializer, (100, 7), dtype, begin, end)
        assert rows.tobytes() == expected[begin:end].tobytes()


WITHOUT_BLOCKS = {
    "drawn one after the other": lambda: keras.initializers.RandomUniform(seed=keras.random.SeedGenerator(3)),
    "an array": lambda: keras.initializers.Constant(np.ones([100, 7])),
    "orthogonal": lambda: "orthogonal",
    "a function": lambda: lambda shape, dtype: keras.ops.ones(shape, dtype),
}


@pytest.mark.parametrize("name", WITHOUT_BLOCKS)
def test_other_initializers_need_all_rows(name):
    assert keras_internals.rows_initializer(table(WITHOUT_BLOCKS[name]())) is None


READ = {
    "plain": ({}, True),
    "masked": ({"mask_zero": True}, True),
    "regularized": ({"embeddings_regularizer": "l2"}, False),
    "constrained": ({"embeddings_constraint": "max_norm"}, False),
    "frozen": ({"trainable": False}, False),
    "with LoRA": ({"lora_rank": 2}, False),
}


@pytest.mark.parametrize("name", READ)
def test_which_tables_are_only_looked_up(name):
    options, expected = READ[name]
    assert keras_internals.is_only_looked_up(keras.layers.Embedding(4, 2, **options)) == expected
    assert not keras_internals.is_only_looked_up(keras.layers.ReversibleEmbedding(4, 2))
