"""Catches the errors that only one stage of a pipeline raises, and continues, in each process."""

import pathlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import numpy as np

import tfdist
from tests.caught import error_of
from tfdist.errors import InputError
from tfdist.pipelining.schedule_catalog import make_schedule

ROWS, REFUSED = 16, 4  # with two micro-batches, 8 rows of a batch are refused


class Particular(keras.layers.Layer):
    """Accepts any number of rows but `REFUSED`, or only single rows, with which all processes look for shapes.

    Attributes:
      accepts: whether it accepts other numbers.
    """

    accepts: bool = True

    def call(self, x: Any) -> Any:
        if x.shape[0] == REFUSED or (x.shape[0] != 1 and not self.accepts):
            raise ValueError(f"{x.shape[0]} rows are refused")
        return x


def work(strategy: tfdist.Strategy, directory: pathlib.Path, schedule: str) -> dict[str, list[str]]:
    return {
        "rows": errors_with(strategy, schedule),
        "stateful": [error_of(lambda: trainer_of(strategy, stateful).fit(*arrays(5, 3), batch_size=ROWS, steps=1))],
        "state": refused_state(strategy),
    }


def errors_with(strategy: tfdist.Strategy, schedule: str) -> list[str]:
    """Returns the error of each call that is refused in the last stage, with a call after each that is not."""
    strategy.schedule = make_schedule(schedule, strategy.grid.stages, 2)
    trainer = trainer_of(strategy, particular)
    x, y = arrays(3)
    found = [error_of(lambda: trainer.fit(x, y, batch_size=2 * REFUSED, steps=1, verbose=0)) for _ in range(2)]
    trainer.fit(x, y, batch_size=ROWS, steps=2, verbose=0)
    with mock.patch.object(Particular, "accepts", False):
        found.append(error_of(lambda: trainer.evaluate(x, y, batch_size=ROWS)))
        found.append(error_of(lambda: trainer.predict(x, batch_size=ROWS)))
    assert np.isfinite(trainer.evaluate(x, y, batch_size=ROWS)["loss"]) and trainer.step == 2
    return found


def refused_state(strategy: tfdist.Strategy) -> list[str]:
    """Returns the error of a stage that refuses the model before the first step."""
    built = trainer_of(strategy, particular)

    def refuse(_: keras.Model) -> None:
        if strategy.is_last:
            raise InputError("The state cannot be divided. Received: 1 variable. Use another one.")

    strategy.optimizer_shards.build = refuse
    return [error_of(lambda: built.fit(*arrays(3), batch_size=ROWS, steps=1, verbose=0))]


def arrays(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    return random.random((2 * ROWS, *shape)).astype("float32"), random.random((2 * ROWS, 1)).astype("float32")


def trainer_of(strategy: tfdist.Strategy, make: Callable[[], keras.Model]) -> tfdist.Trainer:
    with strategy.scope():
        return tfdist.Trainer(make(), optimizer="sgd", loss="mse")


def particular() -> keras.Model:
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, name="first")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1, name="last")(Particular()(hidden)))


def stateful() -> keras.Model:
    """A model whose recurrent layer needs the 8 rows of a micro-batch."""
    inputs = keras.Input((5, 3), batch_size=8)
    hidden = keras.layers.Dense(4, name="first")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1, name="last")(keras.layers.LSTM(2, stateful=True)(hidden)))
