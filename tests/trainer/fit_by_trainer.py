"""Runs a script whose `model.fit` is that of a `Trainer` on two replicas, or Keras's own; prints what each fit returned.

python tests/trainer/fit_by_trainer.py trainer|keras SCRIPT
"""

import json
import runpy
import sys
from typing import Any

import keras

import tfdist

COMPILED: dict[int, dict[str, Any]] = {}  # what each model was compiled with, by id
HISTORIES: list[dict[str, list[float]]] = []
by, script = sys.argv[1], sys.argv[2]
strategy = tfdist.load_strategy("mirrored", devices=2) if by == "trainer" else tfdist.load_strategy("single")
keras_fit, keras_compile = keras.Model.fit, keras.Model.compile


def compile(self, optimizer="rmsprop", loss=None, loss_weights=None, metrics=None, weighted_metrics=None, **others):
    keras_compile(self, optimizer, loss, loss_weights, metrics, weighted_metrics, **others)
    given = {"optimizer": optimizer, "loss": loss, "loss_weights": loss_weights}
    COMPILED.setdefault(id(self), given | {"metrics": metrics or (), "weighted_metrics": weighted_metrics or ()})


def fit(self, *args, **kwargs):
    options = kwargs | {"verbose": 0}
    made = (
        tfdist.Trainer(self, **COMPILED[id(self)]).fit if by == "trainer" else lambda *a, **k: keras_fit(self, *a, **k)
    )
    found = made(*args, **options)
    HISTORIES.append({name: [float(value) for value in values] for name, values in found.history.items()})
    return found


keras.Model.compile, keras.Model.fit = compile, fit
sys.argv = sys.argv[2:]
with strategy.scope():
    runpy.run_path(script, run_name="__main__")
print("\n" + json.dumps(HISTORIES))
