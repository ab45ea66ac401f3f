"""An embedding with a row per key, for clicks on pages of users whose numbers are not known before.

cd examples && tfdist launch --processes=2 --servers=2 -- tfdist train --strategy=parameter_server --staleness=async \
        --model=rows_by_key:network --dataset=rows_by_key:clicks --optimizer="adagrad(learning_rate=0.1)" --epochs=3
"""

import keras
import numpy as np

import tfdist


def network(classes, admit_after: int = 2, evict_after: int = 1000):
    """Returns the model; `classes` is passed by tfdist, because the function has this parameter."""
    keys = keras.Input((2,), dtype="int64", name="keys")
    rows = tfdist.layers.DynamicEmbedding(8, admit_after=admit_after, evict_after=evict_after)(keys)
    hidden = keras.layers.Dense(16, activation="relu")(keras.layers.Flatten()(rows))
    return keras.Model(keys, keras.layers.Dense(classes)(hidden))


def clicks(examples: int = 20_000, test_examples: int = 2_000):
    """Returns (x, y) for training and for testing: a user and a page, 64-bit numbers, and whether the user clicks."""
    rng = np.random.default_rng(0)
    keys = rng.zipf(1.2, (examples + test_examples, 2)) % 10**6 * 2_654_435_761 + [0, 1]
    likes = np.sin(keys[:, 0] % 1009) + np.cos(keys[:, 1] % 1013)
    y = (likes + rng.normal(0, 0.3, len(keys)) > 0).astype("int64")
    return (keys[test_examples:], y[test_examples:]), (keys[:test_examples], y[:test_examples])
