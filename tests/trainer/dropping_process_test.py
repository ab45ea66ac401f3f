"""On real processes, a late rank drops micro-steps, and each update is that of the rows which the ledger says were used."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.selection import quick
from tests.workers import dropping, running

pytestmark = pytest.mark.processes
PER_MICRO_STEP = dropping.BATCH_SIZE // 2 // dropping.MICRO_STEPS


class Expected(NamedTuple):
    """What one device gives: the weights, the mean loss of the steps, and means of metrics."""

    weights: list[np.ndarray]
    loss: float
    metrics: dict[str, float]


@pytest.fixture(scope="module", params=quick(["multiworker", "horovod"], "multiworker"))
def ranks(request, tmp_path_factory) -> list[dict[str, Any]]:
    return running.outcomes("dropping", request.param, 2, tmp_path_factory.mktemp("ranks"), seconds=300)


def rows_of(data: Any, numbers: np.ndarray) -> Any:
    return tf.nest.map_structure(lambda values: tf.constant(values[numbers]), data)


def new_model(name: str) -> keras.Model:
    case = dropping.CASES[name]
    keras.utils.set_random_seed(1)
    model = case.model([])
    model.compile(optimizer=keras.optimizers.SGD(dropping.RATE), **case.compiled())
    return model


def batches(ranks: list[dropping.Result]) -> Iterator[list[np.ndarray]]:
    """Yields the examples that each rank used in a step."""
    yield from zip(*(rank.used for rank in ranks), strict=True)


def several(ranks: list[dropping.Result]) -> Expected:
    """Trains on the used rows, each step with all of them in one batch of Keras."""
    model, data = new_model("several"), dropping.CASES["several"].data
    kinds, losses, errors, rows = dropping.losses(), [], 0.0, 0
    for used in batches(ranks):
        x, y, weights = rows_of(data, np.concatenate(used))
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = model.compute_loss(x, y, outputs, weights)
        values = [variable.value for variable in model.trainable_variables]
        model.optimizer.apply(tape.gradient(loss, values), model.trainable_variables)
        losses.append([float(loss), *(float(kind(y[k], outputs[k], weights[k])) for k, kind in kinds.items())])
        errors += float(tf.reduce_sum(abs(outputs["a"] - y["a"])))
        rows += len(x)
    total, *of_outputs = np.mean(losses, axis=0)
    metrics = dict(zip(("a_loss", "b_loss", "c_loss"), of_outputs, strict=True))
    return Expected(model.get_weights(), total, metrics | {"a_mae": errors / rows})


def normalized(ranks: list[dropping.Result]) -> Expected:
    """Trains on the used rows; each micro-step of a rank is normalized by itself, and a rank has its own statistics."""
    model, (x, y) = new_model("normalized"), dropping.CASES["normalized"].data
    [layer] = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    statistics = [[v.numpy() for v in layer.non_trainable_variables] for _ in ranks]
    losses, errors, rows = [], 0.0, 0
    for used in batches(ranks):
        with tf.GradientTape() as tape:
            squares, count = tf.zeros([], tf.float64), 0
            for rank, numbers in enumerate(used):
                _assign(layer, statistics[rank])
                for part in np.split(numbers, len(numbers) // PER_MICRO_STEP):
                    difference = model(tf.constant(x[part]), training=True) - y[part]
                    squares, count = squares + tf.reduce_sum(tf.square(difference)), count + len(part)
                    errors += float(tf.reduce_sum(abs(difference)))
                statistics[rank] = [v.numpy() for v in layer.non_trainable_variables]
            loss = squares / count
        values = [variable.value for variable in model.trainable_variables]
        model.optimizer.apply(tape.gradient(loss, values), model.trainable_variables)
        losses.append(float(loss))
        rows += count
    _assign(layer, np.mean(statistics, axis=0))
    return Expected(model.get_weights(), float(np.mean(losses)), {"mae": errors / rows})


def _assign(layer: keras.Layer, values: Any) -> None:
    for variable, value in zip(layer.non_trainable_variables, values, strict=True):
        variable.assign(value)


@pytest.mark.parametrize("case", [normalized, several])
def test_updates_are_those_of_the_rows_that_were_used(case, ranks, float64):
    found = [rank[case.__name__] for rank in ranks]
    expected = case(found)
    [record] = [record for record in found[0].records if record["kind"] == "train"]
    for rank in found:
        for a, b in zip(rank.weights, expected.weights, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)
    assert record["loss"] == pytest.approx(expected.loss, abs=1e-9)
    assert {name: record[name] for name in expected.metrics} == pytest.approx(expected.metrics, abs=1e-9)


@pytest.mark.parametrize("name", dropping.CASES)
def test_what_is_dropped_is_recorded(name, ranks):
    first, late = (rank[name] for rank in ranks)
    assert late.dropped
    numbers = [np.concatenate([*rank.used, *rank.dropped.values()]) for rank in (first, late)]
    assert sorted(np.concatenate(numbers)) == list(range(dropping.ROWS))
    assert all(len(used) >= PER_MICRO_STEP and len(used) % PER_MICRO_STEP == 0 for used in (*first.used, *late.used))
    rows = [sum(map(len, rank.dropped.values())) for rank in (first, late)]
    [record] = [record for record in first.records if record["kind"] == "train"]
    assert record["dropped_rows"] == sum(rows) and record["dropped_micro_steps"] == sum(rows) / PER_MICRO_STEP
    assert record["dropped_rank"] == rows.index(max(rows))
    seconds = record["step_seconds"] * dropping.STEPS
    assert record["examples_per_second"] == pytest.approx((dropping.ROWS - sum(rows)) / seconds)


def test_a_measured_limit_is_chosen_once_for_all_ranks_and_kept_in_checkpoints(ranks):
    first, late = (rank["measured"] for rank in ranks)
    by_step = {record["step"]: record["dropped_rows"] for record in first.records}
    assert not any(rows for step, rows in by_step.items() if step <= 100)
    assert by_step[dropping.MEASURED_STEPS] > 0
    [(seconds, replicas)] = {tuple(limit) for rank in (first, late) for limit in rank.limits}
    assert replicas == 2 and 0 < seconds < dropping.MICRO_STEPS * dropping.MEASURED_SECONDS
    assert first.dropped > 0
