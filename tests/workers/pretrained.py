"""Loads weights into the model of a pipeline in several ways; returns this process's weights after each."""

import pathlib
from typing import Any

import keras
import numpy as np

import tfdist
from tests.caught import error_of


def model_of() -> keras.Model:
    tokens = keras.Input((4,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(8, 4, tie_weights=True, name="table")
    hidden = keras.layers.Dense(4, name="hidden")(table(tokens))
    return keras.Model(tokens, table(keras.layers.Dense(4, name="last")(hidden), reverse=True))


def weights(trainer: tfdist.Trainer) -> dict[str, list]:
    return {variable.path: np.asarray(variable).tolist() for variable in trainer.model.trainable_variables}


def work(strategy: tfdist.Strategy, directory: pathlib.Path) -> dict[str, Any]:
    path = directory / "pretrained.weights.h5"
    found: dict[str, Any] = {}
    x = np.arange(32, dtype="int32").reshape(8, 4) % 8
    for when in ("scope", "outside", "after", "set"):
        with strategy.scope():
            model = model_of()
            if when == "scope":
                model.load_weights(path)
        if when == "outside":
            model.load_weights(path)
        if when == "set":
            reference = model_of()
            reference.load_weights(path)
            model.set_weights(reference.get_weights())
            found["read"] = all(map(np.array_equal, model.get_weights(), reference.get_weights()))
        with strategy.scope():
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            trainer = tfdist.Trainer(model, optimizer="sgd", loss=loss)
        if when == "after":
            trainer.fit(x, x, batch_size=8, steps=1, verbose=0)
            trainer.model.load_weights(path)
        found[when] = weights(trainer)
    found["get"] = error_of(model.get_weights)
    found["save"] = error_of(lambda: trainer.model.save_weights(directory / f"{strategy.cluster.rank}.weights.h5"))
    return found
