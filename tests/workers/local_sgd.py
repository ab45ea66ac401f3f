"""Trains a few steps with each way of keeping replicas in agreement in the arguments, in float64."""

import pathlib

import keras
import numpy as np

import tfdist

STEPS, BATCH = 7, 10


def train(strategy: tfdist.Strategy, sync: str) -> dict:
    """Trains a small model; returns the global weights, the losses and the evaluation."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    random = np.random.default_rng(0)
    data = random.standard_normal((40, 6)), random.integers(0, 3, 40)
    with strategy.scope():
        trainer = tfdist.Trainer(
            keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]),
            optimizer=keras.optimizers.SGD(0.1),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            sync=sync,
        )
    history = trainer.fit(data, batch_size=BATCH, steps=STEPS, verbose=0, schedule=tfdist.Schedule(log_every=1))
    with trainer.averaged_weights():
        weights = [np.asarray(strategy.local(v.value)[0]) for v in trainer.model.trainable_variables]
    return {
        "weights": weights,
        "losses": [(record["loss"], record["accuracy"]) for record in history.records],
        "evaluation": trainer.evaluate(data),
    }


def work(strategy: tfdist.Strategy, directory: pathlib.Path, *syncs: str) -> dict[str, dict]:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    return {sync: train(strategy, sync) for sync in syncs}
