"""Trains clients of unequal size, in float64, with all that depends on the client: random masks, statistics, Adam."""

import pathlib
from typing import Any

import keras
import numpy as np

import tfdist

SYNC = "fedavg(clients=7, fraction=0.6, local_epochs=2, shards_per_client=2, client_sizes=power_law, proximal=0.1)"


def work(strategy: tfdist.Strategy, directory: pathlib.Path, sync: str = SYNC) -> tuple[list[Any], list[Any]]:
    keras.config.set_floatx("float64")
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    numbers = np.random.default_rng(2)
    data = numbers.standard_normal((90, 6)), numbers.integers(0, 3, 90)
    # With Adam's default epsilon, rounding decides about gradients that are zero, as in a batch of one row.
    with strategy.scope():
        layers = keras.layers
        hidden = [layers.Dense(5, use_bias=False), layers.BatchNormalization(momentum=0.5), layers.Dropout(0.3)]
        model = keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3)])
        trainer = tfdist.Trainer(
            model,
            optimizer=keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 1, 0.7), epsilon=0.1),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            sync=sync,
        )
    log = tfdist.Schedule(log_every=1, steps_per_call=2)
    history = trainer.fit(data, batch_size=4, steps=5, verbose=0, schedule=log)
    names = ("step", "epoch", "loss", "accuracy", "learning_rate", "gradient_norm")
    records = [[record[name] for name in names] for record in history.records]
    return [np.asarray(weight) for weight in model.get_weights()], records
