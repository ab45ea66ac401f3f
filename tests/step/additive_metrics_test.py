"""Metrics of a user that do not add up over batches, or over rows."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import tfdist
from tests.step.row_dependence import dependence
from tests.step.user_metrics import (
    Count,
    Heaviest,
    Moving,
    OfBatches,
    Peak,
    gathered_root,
    mean,
    per_row,
    root,
    total,
    where_positive,
)
from tfdist.errors import InputError

ops = keras.ops
X, Y = np.random.default_rng(0).normal(size=(2, 16, 4)).astype("float32")


CASES: dict[str, tuple[Callable[[], Any], dict[str, str]]] = {
    "mean": (lambda: mean, {}),
    "a value for each row": (lambda: per_row, {}),
    "sum": (lambda: total, {"total": "rows"}),
    "root": (lambda: root, {"root": "rows"}),
    "root of gathered rows": (lambda: gathered_root, {"gathered_root": "rows"}),
    "mean over a mask": (lambda: where_positive, {"where_positive": "rows"}),
    "mean of batches": (OfBatches, {"ofbatches": "rows"}),
    "maximum": (Peak, {"peak": "batches"}),
    "moving mean": (Moving, {"moving": "batches"}),
    "count": (Count, {}),
    "of Keras": (lambda: "mae", {}),
    "of Keras, of all rows": (lambda: keras.losses.dice, {"dice": "rows"}),
    "loss of Keras, of all rows": (keras.losses.Dice, {"dice": "rows"}),
    "of Keras, over rows": (lambda: keras.metrics.PearsonCorrelation(axis=0), {"pearson_correlation": "rows"}),
}


def network(**metrics: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(4)])
    model.compile("sgd", "mse", **metrics)
    return model


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_add_up_is_found(case: str) -> None:
    make, expected = CASES[case]
    model = network(metrics=[make()])
    model.evaluate(X, Y, verbose=0)  # builds the metrics
    with_gathering = {name: found for name, found in expected.items() if name != "gathered_root"}
    assert dependence(model, X, Y, replicas=2).metrics == with_gathering
    assert dependence(model, X, Y, micro_steps=2).metrics == expected
    assert dependence(model, X, Y, micro_steps=2, may_be_called=False).metrics == expected
    of_batches = {name: found for name, found in expected.items() if found == "batches"}
    assert dependence(model, X, Y).metrics == of_batches


def test_weights_are_passed_on() -> None:
    model = network(weighted_metrics=[Count(), Heaviest()])
    weights = np.arange(16, dtype="float32")
    model.evaluate(X, Y, sample_weight=weights, verbose=0)
    assert dependence(model, X, Y, weights, micro_steps=2).metrics == {"heaviest": "rows"}


def fit(strategy: tfdist.Strategy, metric: Any, **options: Any) -> list[float]:
    with strategy.scope():
        trainer = tfdist.Trainer(network(), optimizer="sgd", loss="mse", metrics=[metric], **options)
    history = trainer.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    [values] = (values for name, values in history.items() if name != "loss")
    return list(values)


@pytest.mark.parametrize(("metric", "words"), [(root, "root, .* parts of the rows"), (Peak(), "peak, .* the batches")])
def test_a_trainer_refuses_what_is_no_sum_where_replicas_train_locally(
    metric: Any, words: str, mirrored2: tfdist.Strategy
) -> None:
    with pytest.raises(InputError, match=f"Received: {words}"):
        fit(mirrored2, metric, sync="local_sgd(period=2)")


def test_a_trainer_refuses_a_maximum_on_a_mesh(mesh2x2: tfdist.Strategy) -> None:
    with pytest.raises(InputError, match="must be a sum over rows and batches. Received: peak"):
        fit(mesh2x2, Peak())


class Logs(keras.callbacks.Callback):
    """Keeps the largest error of each batch's logs."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.peaks: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.peaks.append(float(logs["peak"]))


def test_a_maximum_is_kept_from_call_to_call(single: tfdist.Strategy, mirrored2: tfdist.Strategy) -> None:
    """Evaluations between the calls use the same metric."""
    alone, arguments = Logs(), {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    network(metrics=[Peak()]).fit(X, Y, callbacks=[alone], **arguments)
    schedule = tfdist.Schedule(steps_per_call=1, eval_every=1)
    for strategy in (single, mirrored2):
        with strategy.scope():
            trainer = tfdist.Trainer(network(), optimizer="sgd", loss="mse", metrics=[Peak()])
        trainer.fit(X, Y, validation_data=(10 * X, Y), schedule=schedule, callbacks=[found := Logs()], **arguments)
        assert found.peaks == pytest.approx(alone.peaks, rel=1e-5)
