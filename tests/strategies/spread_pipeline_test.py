"""Stages that are spread over the devices of their processes give the same result as one device, in float64."""

import pytest

from tests.strategies.pipeline_cases import Case
from tests.strategies.pipeline_test import INTERLEAVED, check, check_equal_bits, outcomes

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("float64")]

BESIDE_HOROVOD, BESIDE_SERVERS = ("horovod", "stage:2;model:2"), ("tensorflow", "stage:2;model:2")
TIED = Case("tied", "adamw", "1f1b", 4, "clip")
OTHERS = (
    Case("regularized", "sgd", "gpipe", 8),
    Case("several", "adamw", "1f1b", 4),
    Case("skip", "sgd", INTERLEAVED, 4),
    Case("frozen", "adamw", "gpipe", 1),
    Case("dropped", micro_batches=1),
    Case("overflowing", "adamw", options="loss_scale"),
)


@pytest.mark.parametrize("job", [pytest.param(BESIDE_HOROVOD, marks=pytest.mark.full), BESIDE_SERVERS])
def test_a_transformer_with_tied_embeddings(job: tuple[str, str]) -> None:
    ranks = [rank[0] for rank in outcomes(job, (TIED,))]
    check(ranks, TIED)
    check_equal_bits(ranks)


@pytest.mark.full
@pytest.mark.parametrize("case", OTHERS, ids=map(str, OTHERS))
def test_other_models(case: Case) -> None:
    ranks = [rank[OTHERS.index(case)] for rank in outcomes(BESIDE_HOROVOD, OTHERS)]
    check(ranks, case)
    check_equal_bits(ranks)


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["horovod", "tensorflow"])
def test_all_three_axes(launcher: str) -> None:
    cases = (TIED, Case("skip", "sgd", "gpipe", 2))
    for i, case in enumerate(cases):
        ranks = [rank[i] for rank in outcomes((launcher, "stage:2;data:2;model:2"), cases)]
        check(ranks, case)
        check_equal_bits(ranks)
