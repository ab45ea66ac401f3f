"""Keras writes weights one at a time, also where the host has memory for a copy of them."""

import contextlib
import pathlib
import tracemalloc

import keras
import numpy as np

from tfdist import keras_internals

LAYERS, WIDTH = 8, 512
BYTES = LAYERS * WIDTH * WIDTH * 4


def peak_of_saving(context: contextlib.AbstractContextManager, model: keras.Model, path: pathlib.Path) -> int:
    tracemalloc.start()
    try:
        with context:
            model.save(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_weights_are_not_held_in_memory(tmp_path: pathlib.Path) -> None:
    model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH) for _ in range(LAYERS))])
    model.save(tmp_path / "first.keras")  # what is imported only now does not count
    plain = peak_of_saving(contextlib.nullcontext(), model, tmp_path / "plain.keras")
    ours = peak_of_saving(keras_internals.weights_in_file(), model, tmp_path / "ours.keras")
    assert plain > BYTES, "Keras needs no replacement any more"
    assert ours < BYTES / 2
    one, other = (keras.saving.load_model(tmp_path / f"{name}.keras") for name in ("plain", "ours"))
    assert all(map(np.array_equal, one.get_weights(), other.get_weights()))
