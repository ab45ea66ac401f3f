"""Pipelines without a flush compute what one device computes with delayed gradients, in float64."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tests.strategies.pipeline_cases import Case, Outcome, make_trainer, outcome_of
from tests.strategies.pipeline_test import THREE, TWO, TWO_BY_TWO, Job, check_equal_bits, compare, outcomes, sizes
from tfdist.data import ArraySource, Pipeline
from tfdist.pipelining.schedule_catalog import make_schedule

pytestmark = pytest.mark.processes

LOGGED_EVERY = 5
VERTICAL = "pipedream(vertical_sync=True)"
CASES: dict[Job, tuple[Case, ...]] = {
    TWO: (Case("regularized", "sgd", "2bw", 2, "ema"), Case("unused", "adamw", "pipedream", 1)),
    THREE: (Case("normalized(micro_batches=4)", "adamw", "pipedream", 4), Case("several", "sgd", VERTICAL, 1)),
}
MORE: dict[Job, tuple[Case, ...]] = {
    TWO: (
        Case("regularized", "sgd", "pipedream", 1),
        Case("several", "adamw", "2bw", 4),
        Case("normalized", "adamw", "pipedream", 1),
        Case("recurrent", "adamw", "pipedream", 2),
        Case("regularized", "adamw", "2bw", 2, "recompute"),
    ),
    THREE: (Case("skip", "adamw", "pipedream", 1), Case("frozen", "sgd", "2bw", 2), Case("skip", "sgd", VERTICAL, 2)),
    TWO_BY_TWO: (
        Case("regularized", "adamw", "2bw", 2, "check_sync"),
        Case("normalized(replicas=2)", "sgd", "pipedream", 1),
    ),
}


def train_delayed(case: Case, delays: Mapping[str, int]) -> Outcome:
    """Trains on one device: w(t + 1) = update(w(t), gradient(..., w_i(t - D_i), ...)); delays: D_i by paths of variables."""
    strategy = tfdist.load_strategy("single", environment={})
    trainer, made = make_trainer(strategy, case)
    model, optimizer = trainer.model, trainer.model.optimizer
    weights = model.trainable_variables
    optimizer.build(weights)
    assert made.weight is None
    batches = iter(Pipeline(ArraySource((made.x, made.y)), case.batch_size, seed=3).dataset(range(1), 1))
    versions = [[variable.numpy() for variable in weights]]
    losses = []
    for step in range(case.steps):
        x, y = next(batches)
        for place, variable in enumerate(weights):
            variable.assign(versions[max(step - delays[variable.path], 0)][place])
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x, y, model(x, training=True), training=True)
        found = tape.gradient(loss, [variable.value for variable in weights])
        # Also of embeddings, as tfdist sends them. The optimizer does not get variables without a gradient.
        pairs = [(tf.convert_to_tensor(g), v) for g, v in zip(found, weights, strict=True) if g is not None]
        for place, variable in enumerate(weights):
            variable.assign(versions[step][place])
        optimizer.apply(*map(list, zip(*pairs, strict=True)))
        versions.append([variable.numpy() for variable in weights])
        losses.append(float(loss))
    means = np.reshape(losses, (-1, LOGGED_EVERY)).mean(axis=1)
    keras.utils.clear_session(free_memory=False)
    return outcome_of(trainer, made, [{"loss": float(loss)} for loss in means])


def stages_of(ranks: list[Outcome], job: Job) -> dict[str, int]:
    replicas = sizes(job[1])[1]
    return {path: rank // replicas for rank, each in enumerate(ranks) for path in each.variables}


def check(ranks: list[Outcome], wanted: Outcome) -> None:
    """Asserts that all processes together have what the reference has, whose records are losses, up to rounding."""
    losses = [[{"loss": record["loss"]} for record in rank.records] for rank in ranks]
    compare([dataclasses.replace(rank, records=records) for rank, records in zip(ranks, losses, strict=True)], wanted)


def pairs(found: dict[Job, tuple[Case, ...]], *marks: pytest.MarkDecorator) -> list[Any]:
    """Returns the arguments of a test for each case: its job with all its cases, and the number of the case."""
    return [
        pytest.param(job, some, number, marks=marks, id=f"{job[1]}-{case}")
        for job, some in found.items()
        for number, case in enumerate(some)
    ]


@pytest.mark.parametrize(("job", "cases", "number"), [*pairs(CASES), *pairs(MORE, pytest.mark.full)])
def test_a_pipeline_without_a_flush_equals_one_device_with_delayed_gradients(
    job: Job, cases: tuple[Case, ...], number: int, float64: None
) -> None:
    """And no device with weights that are newer: in all stages, or in the last one whose weights are older."""
    ranks, case = [rank[number] for rank in outcomes(job, cases)], cases[number]
    check_equal_bits(ranks)
    delays = make_schedule(case.schedule, sizes(job[1])[0], case.micro_batches).delays
    stages = stages_of(ranks, job)
    check(ranks, train_delayed(case, {path: delays[stage] for path, stage in stages.items()}))
    last = max(stage for stage, delay in enumerate(delays) if delay)
    for fresh in (set(range(len(delays))), {last}):
        newer = {path: 0 if stage in fresh else delays[stage] for path, stage in stages.items()}
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            check(ranks, train_delayed(case, newer))
