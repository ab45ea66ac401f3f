"""Trains a pipeline without a flush in several ways; returns for each what this process has at the end.

A row of zeros makes a gradient of one variable NaN, and a row of NaN those of all variables.
"""

import pathlib
from typing import Any

import keras
import numpy as np

import tfdist
from tests.strategies.pipeline_models import Root
from tfdist.errors import NotFiniteError

ROWS, FEATURES, BATCH, STEPS, PER_CALL = 64, 6, 16, 8, 4


def work(strategy: tfdist.Strategy, directory: pathlib.Path) -> dict[str, dict[str, Any]]:
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    strategy.cut = "second"
    found = {"first": _trained(strategy, "first", 0.0), "last": _trained(strategy, "last", 0.0)}
    found["all"] = _trained(strategy, "last", np.nan)
    for name in ("first", "last", "all"):
        place = "first" if name == "first" else "last"
        found[f"{name}, before"] = _trained(strategy, place, 1.0, steps=found[name]["step"])
    found["plain"] = _trained(strategy, "last", 1.0)
    found["observed"] = _trained(strategy, "last", 1.0, evaluates=True)
    return found


def _trained(
    strategy: tfdist.Strategy, place: str, value: float, steps: int = STEPS, evaluates: bool = False
) -> dict[str, Any]:
    """Trains; a row of the data, which belongs to the third step, has the value in all features."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    generator = np.random.default_rng(0)
    x, y = generator.uniform(0.5, 2.0, (ROWS, FEATURES)), generator.integers(0, 3, ROWS)
    x[2 * BATCH + 1] = value
    with strategy.scope():
        trainer = tfdist.Trainer(
            _model(place),
            optimizer=keras.optimizers.AdamW(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            seed=3,
        )
    callbacks = [Evaluation(trainer, x, y)] if evaluates else []
    message = ""
    records: list[Any] = []
    try:
        records = _fit(trainer, x, y, steps, callbacks) if steps else []
    except NotFiniteError as error:
        message = str(error)
    optimizer = trainer.model.optimizer
    variables = [*trainer.model.variables, *optimizer.variables]
    return {
        "message": message,
        "step": trainer.step,
        "variables": {v.path: np.asarray(v) for v in variables if "learning_rate" not in v.path},
        "versions": {name: array.values for name, array in trainer.state.items() if "delayed/" in name},
        "losses": [record["loss"] for record in records],
        "sent": [(record.get("message_bytes"), record.get("payload_bytes")) for record in records],
        "evaluations": [loss for callback in callbacks for loss in callback.losses],
    }


def _fit(trainer: tfdist.Trainer, x: np.ndarray, y: np.ndarray, steps: int, callbacks: list[Any]) -> list[Any]:
    schedule = tfdist.Schedule(log_every=PER_CALL, steps_per_call=PER_CALL)
    options = {"batch_size": BATCH, "steps": steps, "shuffle": False, "verbose": 0}
    return trainer.fit(x, y, schedule=schedule, callbacks=callbacks, **options).records


class Evaluation(keras.callbacks.Callback):
    def __init__(self, trainer: tfdist.Trainer, x: np.ndarray, y: np.ndarray):
        super().__init__()
        self._trainer, self._x, self._y = trainer, x, y
        self.losses: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.losses.append(self._trainer.evaluate(self._x, self._y, batch_size=BATCH)["loss"])


def _model(place: str) -> keras.Model:
    """Returns a model with a layer `root` in its first or its last stage."""
    inputs = x = keras.Input((FEATURES,))
    if place == "first":
        x = Root(name="root")(x)
    for name in ("first", "second", "third"):
        x = keras.layers.Dense(FEATURES, "tanh", name=name)(x)
    if place == "last":
        x = keras.layers.Add(name="sum")([x, Root(name="root")(inputs)])
    return keras.Model(inputs, keras.layers.Dense(3, name="last")(x))
