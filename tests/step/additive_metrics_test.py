"""Metrics of a user that do not add up over batches, or over rows."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import tfdist
from tests.step.row_dependence import dependence
from tests.step.user_metrics import (
    Count,
    Gathered,
    Heaviest,
    Moving,
    OfBatches,
    OfKeras,
    Peak,
    Root,
    Summed,
    gathered_root,
    mean,
    per_row,
    root,
    total,
    where_positive,
    where_second_is_positive,
)
from tfdist.errors import InputError
from tfdist.trainer import trainer as trainer_module

ops = keras.ops
X, Y = np.random.default_rng(0).normal(size=(2, 16, 4)).astype("float32")


CASES: dict[str, tuple[Callable[[], Any], dict[str, str]]] = {
    "mean": (lambda: mean, {}),
    "a value for each row": (lambda: per_row, {}),
    "sum": (lambda: total, {"total": "rows"}),
    "sum in a Sum": (lambda: Summed(name="summed"), {}),
    "root": (lambda: root, {"root": "rows"}),
    "root of gathered rows": (lambda: gathered_root, {"gathered_root": "rows"}),
    "mean over a mask": (lambda: where_positive, {"where_positive": "rows"}),
    "NaN without some rows": (lambda: where_second_is_positive, {"where_second_is_positive": "rows"}),
    "mean of batches": (OfBatches, {"ofbatches": "rows"}),
    "partial function": (lambda: functools.partial(root), {"partial": "rows"}),
    "object": (Root, {"root": "rows"}),
    "maximum": (Peak, {"peak": "batches"}),
    "moving mean": (Moving, {"moving": "batches"}),
    "count": (Count, {}),
    "subclass": (OfKeras, {}),
    "of Keras": (lambda: "mae", {}),
    "of Keras, of all rows": (lambda: keras.losses.dice, {"dice": "rows"}),
    "loss of Keras, of all rows": (keras.losses.Dice, {"dice": "rows"}),
    "of Keras, over rows": (lambda: keras.metrics.PearsonCorrelation(axis=0), {"pearson_correlation": "rows"}),
    "of Keras, over columns": (lambda: keras.metrics.CosineSimilarity(axis=-1), {}),
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


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ([gathered_root, root], {"root": "rows"}),
        ([Gathered(is_shared=True)], {}),
        ([Gathered(is_shared=False)], {"gathered": "rows"}),
    ],
)
def test_metrics_that_communicate_are_summed_over_replicas(metrics: list[Any], expected: dict[str, str]) -> None:
    model = network(metrics=metrics)
    model.evaluate(X, Y, verbose=0)
    assert dependence(model, X, Y, replicas=2).metrics == expected


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


@pytest.mark.parametrize(
    ("metric", "words"), [(root, "root, .* the rows do not add up"), (Peak(), "peak, .* the batches")]
)
def test_a_trainer_refuses_what_is_no_sum_where_replicas_train_locally(
    metric: Any, words: str, mirrored2: tfdist.Strategy
) -> None:
    with pytest.raises(InputError, match=f"Received: {words}"):
        fit(mirrored2, metric, sync="local_sgd(period=2)")


@pytest.mark.parametrize("metric", [mean, per_row, gathered_root, root], ids=lambda metric: metric.__name__)
def test_it_is_that_of_one_device(metric: Any, mirrored2: tfdist.Strategy) -> None:
    alone = (
        network(metrics=[metric]).fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history[metric.__name__]
    )
    assert fit(mirrored2, metric) == pytest.approx(alone, rel=1e-5)


def of_batches_of_eight(y: Any, outputs: Any) -> Any:
    pairs = ops.reshape(y - outputs, (4, 2, 4))
    return ops.mean(ops.square(pairs[:, 0] - pairs[:, 1]))


def test_on_one_replica_a_metric_is_not_updated_with_parts_of_a_batch(
    single: tfdist.Strategy, caplog: pytest.LogCaptureFixture
) -> None:
    fit(single, of_batches_of_eight)
    assert "could not be checked" not in caplog.text


def test_a_trainer_refuses_a_maximum_on_a_mesh(mesh2x2: tfdist.Strategy) -> None:
    with pytest.raises(InputError, match="must be a sum over rows and batches .* Received: peak"):
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


def test_an_evaluation_without_training_is_checked_once(
    single: tfdist.Strategy, mirrored2: tfdist.Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trainer(strategy: tfdist.Strategy, metric: Any) -> tfdist.Trainer:
        with strategy.scope():
            return tfdist.Trainer(network(), optimizer="sgd", loss="mse", metrics=[metric])

    checked = []
    original = trainer_module.check_standalone_evaluation
    monkeypatch.setattr(trainer_module, "check_standalone_evaluation", lambda *given: checked.append(original(*given)))
    peaks = [trainer(strategy, Peak()).evaluate(X, Y)["peak"] for strategy in (single, mirrored2)]
    assert peaks[1] == pytest.approx(peaks[0])
    checked.clear()
    accepted = trainer(mirrored2, mean)
    found = [accepted.evaluate(X, Y)["mean"] for _ in range(2)]
    assert found == pytest.approx([trainer(single, mean).evaluate(X, Y)["mean"]] * 2)
    accepted.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    accepted.evaluate(X, Y)
    assert len(checked) == 2  # of each trainer
