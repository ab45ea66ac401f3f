"""Trains a stage on two devices in each of two replicas, then flips a bit in one of them; returns the error."""

import pathlib

import numpy as np

import tfdist
from tests.strategies import pipeline_models
from tfdist import keras_internals
from tfdist.errors import DesyncError


def work(strategy: tfdist.Strategy, directory: pathlib.Path) -> str:
    with strategy.scope():
        made = pipeline_models.skip()
        trainer = tfdist.Trainer(made.model, optimizer="adam", **made.options)
    _fit(trainer, made)
    if strategy.cluster.rank == 1:
        [kernel] = [v for v in trainer.model.trainable_variables if v.path == "last/kernel"]
        value = np.array(keras_internals.value_of(kernel))
        value.view(np.uint8)[-1, -2] ^= 1
        kernel.assign(value)
    try:
        _fit(trainer, made)
    except DesyncError as error:
        return str(error)
    return ""


def _fit(trainer: tfdist.Trainer, made: pipeline_models.Made) -> None:
    trainer.fit(made.x, made.y, batch_size=16, steps=4, checks=tfdist.Checks(check_sync_every=2), verbose=0)
