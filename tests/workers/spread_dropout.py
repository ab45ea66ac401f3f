"""Trains a stage on two devices whose layers with dropout are recomputed; returns the error."""

import pathlib

import tfdist
from tests.strategies import pipeline_models
from tfdist.errors import InputError


def work(strategy: tfdist.Strategy, directory: pathlib.Path) -> str:
    with strategy.scope():
        made = pipeline_models.dropped()
        trainer = tfdist.Trainer(tfdist.recompute(made.model), optimizer="adam", **made.options)
    try:
        trainer.fit(made.x, made.y, batch_size=16, steps=2, verbose=0)
    except InputError as error:
        return str(error)
    return ""
