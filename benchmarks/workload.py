"""The one workload that every side runs: an MLP of 8.4 million parameters (33.6 MB of gradients), 64 examples a rank."""

import keras
import numpy as np

INPUTS, HIDDEN, CLASSES = 1024, 2048, 1024
BATCH = 64
EXAMPLES = 2048


def model() -> keras.Model:
    """The MLP, with the same weights in every process."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((INPUTS,)),
            keras.layers.Dense(HIDDEN, activation="relu"),
            keras.layers.Dense(HIDDEN, activation="relu"),
            keras.layers.Dense(CLASSES),
        ]
    )


def examples(count: int = EXAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Random inputs and labels, the same in every process."""
    random = np.random.default_rng(100)
    return random.standard_normal((count, INPUTS), dtype="float32"), random.integers(0, CLASSES, count)
