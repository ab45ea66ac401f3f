"""Trains models in which one rank is late at random, and drops its micro-steps."""

import contextlib
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.reporting.ledger_file import LedgerFile, read_dropped, read_ledger

RANDOM = np.random.default_rng(0)
STEPS, BATCH_SIZE, MICRO_STEPS = 8, 32, 4
ROWS = STEPS * BATCH_SIZE  # one epoch
X = RANDOM.standard_normal((ROWS, 8))
X[:, 0] = np.repeat(RANDOM.uniform(size=STEPS * 2 * MICRO_STEPS) < 0.25, ROWS // (STEPS * 2 * MICRO_STEPS))
Y = {name: RANDOM.standard_normal((ROWS, 1)) for name in "abc"}
WEIGHTS = {"a": RANDOM.uniform(0, 2, ROWS), "b": RANDOM.uniform(0, 2, ROWS), "c": np.ones(ROWS)}
RATE = 0.1
LATE = 1  # a rank
SECONDS, AFTER = 0.1, 0.05
MEASURED_STEPS, MEASURED_SECONDS = 130, 0.04


class Result(NamedTuple):
    """What a rank found.

    Attributes:
      weights: all weights after training.
      records: records of training.
      used: indices of the examples that this rank used in each step.
      dropped: those that it left out, by step.
    """

    weights: list[np.ndarray]
    records: list[dict[str, Any]]
    used: list[np.ndarray]
    dropped: dict[int, np.ndarray]


class Late(keras.layers.Layer):
    """Takes longer on the late rank if the first feature of a row of the micro-step is 1."""

    def __init__(self, seconds: float):
        super().__init__()
        self.seconds = seconds

    def call(self, inputs):
        rank = tfdist.current_strategy().cluster.rank

        def sleep(values: np.ndarray) -> np.ndarray:
            if rank == LATE and values[:, 0].any():
                time.sleep(self.seconds)
            return values

        slept = tf.numpy_function(sleep, [tf.stop_gradient(inputs)], inputs.dtype)
        return inputs + 0 * tf.ensure_shape(slept, inputs.shape)


def normalized(first: list[keras.layers.Layer]) -> keras.Model:
    """Returns a model with batch normalization."""
    hidden = [keras.layers.Dense(4, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((8,)), *first, *hidden])


def several(first: list[keras.layers.Layer]) -> keras.Model:
    """Returns a model with three outputs and a penalty of the weights."""
    x = inputs = keras.Input((8,))
    for layer in first:
        x = layer(x)
    x = keras.layers.Dense(4, "tanh", kernel_regularizer=keras.regularizers.L2(0.01))(x)
    return keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(x) for name in "abc"})


class Case(NamedTuple):
    """A model, its data and arguments of `compile`, which are created in the precision of the test."""

    model: Callable[[list[keras.layers.Layer]], keras.Model]
    data: tuple[Any, ...]
    compiled: Callable[[], dict[str, Any]]


def losses() -> dict[str, keras.Loss]:
    """Returns losses that are divided by sums of different weights and by nothing; the penalty is a mean over rows."""
    return {
        "a": keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        "b": keras.losses.Huber(reduction="mean_with_sample_weight"),
        "c": keras.losses.MeanSquaredError(reduction="sum"),
    }


RATES = {"a": 1.0, "b": 0.5, "c": 0.01}
CASES = {
    "normalized": Case(normalized, (X, Y["a"]), lambda: {"loss": "mse", "metrics": ["mae"]}),
    "several": Case(
        several, (X, Y, WEIGHTS), lambda: {"loss": losses(), "loss_weights": RATES, "metrics": {"a": ["mae"]}}
    ),
}


def train(strategy: tfdist.Strategy, directory: pathlib.Path, name: str) -> Result:
    """Trains a model on a strategy."""
    keras.utils.set_random_seed(1)
    case = CASES[name]
    with strategy.scope():
        model = case.model([Late(SECONDS)])
        optimizer = keras.optimizers.SGD(RATE)
        options = {"accumulate_steps": MICRO_STEPS, "straggler": f"drop(after={AFTER})"}
        trainer = tfdist.Trainer(model, optimizer=optimizer, **case.compiled(), **options)
    path = directory / f"ledger-{name}-{strategy.cluster.rank}"
    with contextlib.closing(LedgerFile(path)) as ledger:
        history = trainer.fit(
            case.data,
            batch_size=BATCH_SIZE,
            steps=STEPS,
            shuffle=False,
            schedule=tfdist.Schedule(log_every=STEPS, steps_per_call=5),
            reporting=tfdist.Reporting(ledger=ledger),
            verbose=0,
        )
    used = [numbers for _, numbers in read_ledger(path)]
    return Result(model.get_weights(), history.records, used, dict(read_dropped(path)))


class Measured(NamedTuple):
    """What a rank found in a run with a limit that is measured, and in one that resumes it.

    Attributes:
      records: records of training.
      limits: the limit and the number of replicas in the state of both runs, after each.
      dropped: number of rows that the second run left out.
    """

    records: list[dict[str, Any]]
    limits: list[np.ndarray]
    dropped: int


def measure(strategy: tfdist.Strategy, directory: pathlib.Path) -> Measured:
    """Trains with one late step in 5, and resumes."""
    late = np.repeat(np.arange(MEASURED_STEPS) % 5 == 0, BATCH_SIZE)
    x = np.column_stack([late, RANDOM.standard_normal((len(late), 7))])
    checkpoints = tfdist.Checkpoints(directory=str(directory / "checkpoints"), every=str(MEASURED_STEPS))
    options = {"accumulate_steps": MICRO_STEPS, "straggler": "drop(after=auto)"}
    records, limits = [], []
    for steps in (MEASURED_STEPS, MEASURED_STEPS + 20):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            trainer = tfdist.Trainer(normalized([Late(MEASURED_SECONDS)]), optimizer="sgd", loss="mse", **options)
        trainer.build((x, x[:, :1]))
        assert trainer.resume(checkpoints.directory) == len(records) * MEASURED_STEPS
        history = trainer.fit(
            (x, x[:, :1]), batch_size=BATCH_SIZE, steps=steps, shuffle=False, checkpoints=checkpoints, verbose=0
        )
        records.append([record for record in history.records if record["kind"] == "train"])
        limits.append(trainer.state["straggler/limit"].values)
    return Measured(records[0], limits, sum(record["dropped_rows"] for record in records[1]))


def work(strategy: tfdist.Strategy, directory: pathlib.Path) -> dict[str, Result | Measured]:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    return {name: train(strategy, directory, name) for name in CASES} | {"measured": measure(strategy, directory)}
