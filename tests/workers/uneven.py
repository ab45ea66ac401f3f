"""Trains a model in which one rank is twice as slow for each row, with rows that are allocated by speed."""

import contextlib
import pathlib
import time
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.reporting.ledger_file import LedgerFile, read_ledger

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.standard_normal((96, 8)), RANDOM.standard_normal((96, 1))
STEPS, BATCH_SIZE, SECONDS_PER_ROW = 120, 32, 4e-4
SLOW = 1  # a rank


class Result(NamedTuple):
    """What a rank found."""

    weights: list[np.ndarray]
    counts: list[int] | None  # rows of each replica at the end
    used: list[int]  # number of rows that this rank used in each step


class Sleeping(keras.layers.Layer):
    """Takes time in proportion to its rows, twice as much on the slow rank."""

    def call(self, inputs):
        rank = tfdist.current_strategy().cluster.rank

        @tfdist.row_semantics.register(rows_to="rows")
        def slept(x: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(sleep, [x], x.dtype), x.shape)

        def sleep(values: np.ndarray) -> np.ndarray:
            time.sleep(len(values) * SECONDS_PER_ROW * (2 if rank == SLOW else 1))
            return values

        return inputs + 0 * slept(tf.stop_gradient(inputs))


def train(strategy: tfdist.Strategy, folder: pathlib.Path, balance: str) -> Result:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.Input((8,)), Sleeping(), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        trainer = tfdist.Trainer(model, optimizer=keras.optimizers.SGD(0.1), loss="mse", balance=balance)
    path = folder / f"ledger-{strategy.cluster.rank}"
    with contextlib.closing(LedgerFile(path)) as ledger:
        reporting = tfdist.Reporting(ledger=ledger)
        trainer.fit((X, Y), batch_size=BATCH_SIZE, steps=STEPS, reporting=reporting, verbose=0)
    speeds = trainer.train_state.speeds
    used = [len(numbers) for _, numbers in read_ledger(path)]
    return Result(model.get_weights(), speeds and speeds.counts, used)


def work(strategy: tfdist.Strategy, directory: pathlib.Path) -> Result:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    return train(strategy, directory, "measured")
