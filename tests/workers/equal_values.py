"""Builds a model without a seed on a pipeline, and saves it; returns this process's weights before and after a step."""

import pathlib
from typing import Any

import keras
import numpy as np

import tfdist
from tests.caught import error_of
from tests.workers.pretrained import weights


def work(strategy: tfdist.Strategy, directory: pathlib.Path) -> dict[str, Any]:
    keras.utils.set_random_seed(strategy.cluster.rank)  # as processes without a seed
    with strategy.scope():
        tokens = keras.Input((4,), dtype="int32")
        table = keras.layers.ReversibleEmbedding(8, 4, tie_weights=True, name="table")
        hidden = keras.layers.Dropout(0.5)(keras.layers.Dense(4, name="hidden")(table(tokens)))
        model = keras.Model(tokens, table(keras.layers.Dense(4, name="last")(hidden), reverse=True))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = tfdist.Trainer(model, optimizer="sgd", loss=loss)
    x = np.arange(32, dtype="int32").reshape(8, 4) % 8
    trainer.build((x, x))
    before = weights(trainer)
    trainer.fit(x, x, batch_size=8, steps=1, verbose=0)
    trainer.save(str(directory / "model.keras"))
    trainer.fit(x, x, batch_size=8, steps=1, verbose=0)  # the states of random layers are still there
    other = "" if strategy.pipeline_rank else error_of(lambda: np.asarray(model.get_layer("last").kernel))
    return {"before": before, "after": weights(trainer), "other": other}
