"""Trains cases with a sharded and with a whole optimizer in the same processes."""

import pathlib
from typing import Any
from unittest import mock

import keras
import numpy as np

import tfdist
from tests.keras_fit.models import Damps
from tfdist import keras_internals
from tfdist.distribution.sharded_optimizer import ShardedOptimizer
from tfdist.distribution.strategy import OptimizerShards
from tfdist.gradients import Clip, LossScale
from tfdist.optimizers import LARS


class Clipping(Damps, keras.optimizers.Adafactor):
    """Computes with all gradients in its `apply`, and where it clips them."""


OPTIMIZERS = {
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "lars": lambda: LARS(0.1, momentum=0.9),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "clipping": lambda: Clipping(0.01, global_clipnorm=0.1),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "averaged": {"ema": 0.9, "clip": Clip(norm=0.05)},
    "scaled": {"loss_scale": LossScale(initial=3e38, cap=3e38, growth_interval=3)},  # overflows in float32
    "compressed": {"compression": "topk(ratio=0.3)"},
    "accumulated": {"accumulate_steps": 2},
}
STEPS = 8


def work(strategy: tfdist.Strategy, directory: pathlib.Path, *cases: str) -> dict[str, dict[str, Any]]:
    sharded = strategy.optimizer_shards
    assert isinstance(sharded, ShardedOptimizer)
    found = {case: {"sharded": run(strategy, case)} for case in cases}
    with mock.patch.object(ShardedOptimizer, "exchange"):
        fault = run(strategy, cases[0])
    strategy.optimizer_shards = OptimizerShards(strategy)
    for case in cases:
        found[case]["whole"] = run(strategy, case)
    return {**found, "fault": fault}


def run(strategy: tfdist.Strategy, case: str) -> dict[str, Any]:
    """Trains; returns this process's values by path, those with the averages of weights, and the losses."""
    optimizer, options = case.split("-")
    dtype = "float32" if options == "scaled" else "float64"
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    keras.utils.set_random_seed(3)
    random = np.random.default_rng(5)
    x, y = random.integers(0, 30, (48, 6)), random.integers(0, 5, 48)
    with strategy.scope():
        tokens = keras.Input((6,), dtype="int32")
        hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(30, 24, name="table")(tokens))
        for number in range(2):
            hidden = keras.layers.Dense(24, activation="tanh", name=f"hidden_{number}")(hidden)
        model = keras.Model(tokens, keras.layers.Dense(5, name="last")(hidden))

        def loss(y: Any, outputs: Any) -> Any:
            return 40 * keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)

        trainer = tfdist.Trainer(model, optimizer=OPTIMIZERS[optimizer](), loss=loss, seed=3, **OPTIONS[options])
    history = trainer.fit(x, y, batch_size=12, steps=STEPS, verbose=0, schedule=tfdist.Schedule(log_every=2))
    with trainer.averaged_weights():
        averages = values(strategy, model.variables)
    return {
        "weights": values(strategy, model.variables),
        "averages": averages,
        "state": values(strategy, model.optimizer.variables),
        "paths": [v.path for v in model.optimizer.variables],
        "bytes": strategy.optimizer_shards.state_bytes(model.optimizer),
        "records": [{k: r[k] for k in ("loss", "gradient_norm", "skipped_steps") if k in r} for r in history.records],
    }


def values(strategy: tfdist.Strategy, variables: list[keras.Variable]) -> list[np.ndarray | None]:
    held = [keras_internals.value_of(variable) for variable in variables]
    return [None if value is None else np.asarray(strategy.local(value)[0]) for value in held]
