"""Weights of a model on a pipeline: drawn without a seed, and loaded in several ways; returns those of this process."""

import pathlib
from typing import Any

import keras
import numpy as np

import tfdist
from tests.caught import error_of

X = np.arange(32, dtype="int32").reshape(8, 4) % 8


def model_of(rate: float = 0.0) -> keras.Model:
    tokens = keras.Input((4,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(8, 4, tie_weights=True, name="table")
    hidden = keras.layers.Dense(4, name="hidden")(table(tokens))
    hidden = keras.layers.Dropout(rate)(hidden) if rate else hidden
    return keras.Model(tokens, table(keras.layers.Dense(4, name="last")(hidden), reverse=True))


def trainer_of(model: keras.Model) -> tfdist.Trainer:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return tfdist.Trainer(model, optimizer="sgd", loss=loss)


def weights(trainer: tfdist.Trainer) -> dict[str, list]:
    return {variable.path: np.asarray(variable).tolist() for variable in trainer.model.trainable_variables}


def work(strategy: tfdist.Strategy, directory: pathlib.Path) -> tuple[dict[str, Any], dict[str, Any]]:
    return drawn(strategy, str(directory / "model.keras")), loaded(strategy, directory / "pretrained.weights.h5")


def drawn(strategy: tfdist.Strategy, saved: str) -> dict[str, Any]:
    """Saves a model; returns its weights before and after a step, and the error of reading those of another stage."""
    keras.utils.set_random_seed(strategy.cluster.rank)  # as processes without a seed
    with strategy.scope():
        model = model_of(rate=0.5)
        trainer = trainer_of(model)
    trainer.build((X, X))
    before = weights(trainer)
    trainer.fit(X, X, batch_size=8, steps=1, verbose=0)
    trainer.save(saved)
    trainer.fit(X, X, batch_size=8, steps=1, verbose=0)  # the states of random layers are still there
    other = "" if strategy.pipeline_rank else error_of(lambda: np.asarray(model.get_layer("last").kernel))
    return {"before": before, "after": weights(trainer), "other": other}


def loaded(strategy: tfdist.Strategy, path: pathlib.Path) -> dict[str, Any]:
    """Returns the weights after each way of loading, and errors."""
    found: dict[str, Any] = {}
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
            trainer = trainer_of(model)
        if when == "after":
            trainer.fit(X, X, batch_size=8, steps=1, verbose=0)
            trainer.model.load_weights(path)
        found[when] = weights(trainer)
    found["get"] = error_of(model.get_weights)
    found["save"] = error_of(lambda: trainer.model.save_weights(f"{path}.{strategy.cluster.rank}.weights.h5"))
    return found
