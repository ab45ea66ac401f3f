"""A model with a row per key, for runs in several processes."""

from typing import Any

import keras

import tfdist


def network(**_: Any) -> keras.Model:
    """Returns a model of characters; most of them are admitted late, and some are evicted."""
    key = keras.Input((16,), dtype="int64")
    initializer = keras.initializers.RandomNormal(seed=3)
    rows = tfdist.layers.DynamicEmbedding(8, initializer, admit_after=2, evict_after=3, name="character")(key * 10**9)
    return keras.Model(key, keras.layers.Dense(256)(keras.layers.Dense(16, activation="relu")(rows)))
