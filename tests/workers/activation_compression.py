"""Trains a model with a skip connection across the cuts of a pipeline, once for each compression of activations.

Returns by method the losses of steps, an evaluation, the bytes of this process's messages in a step, and weights; and, for a
loss scale at which gradients overflow, the numbers of skipped steps.
"""

import pathlib
from typing import Any

import keras
import numpy as np

import tfdist
from tfdist.gradients import LossScale
from tfdist.pipelining.activation_compression import METHODS

ROWS, WIDTH, STEPS, MICRO_BATCHES = 64, 96, 12, 4


def work(strategy: tfdist.Strategy, directory: pathlib.Path, *methods: str) -> dict[str, dict[str, Any]]:
    return {method: _trained(strategy, *method.split("/")) for method in methods}


def _trained(strategy: tfdist.Strategy, method: str, precision: str = "float32") -> dict[str, Any]:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    keras.config.set_dtype_policy(precision)
    if strategy.name == "pipeline":
        strategy.activation_compression = METHODS[method]()
    scale = LossScale(initial=2.0**24) if precision == "mixed_float16" else None
    generator = np.random.default_rng(0)
    x = generator.standard_normal((ROWS, 8)).astype("float32")
    y = generator.integers(0, 3, ROWS).astype("int32")
    with strategy.scope():
        trainer = tfdist.Trainer(
            _model(),
            optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            loss_scale=scale,
        )
    reports = tfdist.Schedule(log_every=1, steps_per_call=1)
    records = trainer.fit(x, y, batch_size=ROWS, steps=STEPS, verbose=0, schedule=reports).records
    return {
        "losses": [record["loss"] for record in records],
        "evaluation": trainer.evaluate(x, y, batch_size=ROWS)["loss"],
        "message_bytes": records[-1].get("message_bytes", 0),
        "payload_bytes": records[-1].get("payload_bytes", 0),
        "skipped": sum(record.get("skipped_steps", 0) for record in records),
        "finite": all(np.isfinite(np.asarray(variable)).all() for variable in trainer.model.trainable_variables),
    }


def _model() -> keras.Model:
    inputs = keras.Input((8,))
    x = first = keras.layers.Dense(WIDTH, "tanh", name="first")(inputs)
    for name in ("second", "third", "fourth"):
        x = keras.layers.Dense(WIDTH, "tanh", name=name)(x)
    outputs = keras.layers.Dense(3, name="last", dtype="float32")(keras.layers.Add(name="sum")([x, first]))
    return keras.Model(inputs, outputs)
