"""Pipelines without a flush compute what one device computes with delayed gradients, in float64."""

import dataclasses
from typing import Any

import pytest

from tests.strategies.delayed_training import train_delayed
from tests.strategies.pipeline_cases import Case, Outcome
from tests.strategies.pipeline_test import THREE, TWO, TWO_BY_TWO, Job, check_equal_bits, compare, outcomes, sizes
from tfdist.pipelining.schedule_catalog import make_schedule

pytestmark = pytest.mark.processes

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
