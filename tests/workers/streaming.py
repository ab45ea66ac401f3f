"""Trains with an exchange that is slow on each rank at another time; returns what must be equal for each way to exchange."""

import pathlib
import random
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.gradients import Bucketed, Reducer, ReductionResult, Sum

X, Y = np.random.default_rng(0).normal(size=(64, 6)), np.random.default_rng(1).normal(size=(64, 3))
SECONDS = 0.3
sleeping = random.Random()


class Slow(Reducer):
    """Sums every tensor in a message of its own, each after a random time."""

    def reduce(self, tensors, state, collectives, *, name):
        slept = tf.numpy_function(lambda: time.sleep(sleeping.random() * SECONDS) or np.int32(0), [], tf.int32)
        with tf.control_dependencies([slept]):
            sent = [tf.identity(tensor) for tensor in tensors]
        found = Bucketed(Sum(), small_bytes=0).reduce(sent, state, collectives, name=name)
        return ReductionResult(found.totals, list(tensors), [], found.witnesses)


def work(strategy: tfdist.Strategy, directory: pathlib.Path, *syncs: str) -> list[dict[str, Any]]:
    keras.config.set_floatx("float64")
    sleeping.seed(strategy.cluster.rank)
    found = []
    for sync in syncs:
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(3)])
            trainer = tfdist.Trainer(
                model, optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"], sync=sync, compression=Slow()
            )
        history = trainer.fit(
            X,
            Y,
            batch_size=16,
            steps=22,
            verbose=0,
            validation_data=(X, Y),
            schedule=tfdist.Schedule(log_every=1, eval_every=7),
        )
        with trainer.averaged_weights():
            weights = [np.asarray(strategy.local(v.value)[0]).tolist() for v in model.trainable_variables]
        losses = [[record.get(name) for name in ("loss", "replica_divergence")] for record in history.records]
        found.append({"weights": weights, "losses": losses})
    return found
