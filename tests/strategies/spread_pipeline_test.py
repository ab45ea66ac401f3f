"""Stages that are spread over the devices of their processes give the same result as one device."""

import json
import pathlib
import sys

import pytest

from tests import processes
from tests.strategies.pipeline_cases import Case
from tests.strategies.pipeline_test import INTERLEAVED, check_case, check_job
from tests.workers import running

pytestmark = pytest.mark.processes

BESIDE_HOROVOD, BESIDE_SERVERS = ("horovod", "stage:2;model:2"), ("tensorflow", "stage:2;model:2")
TIED = Case("tied", "adamw", "1f1b", 4, "clip")
OTHERS = (
    Case("regularized", "sgd", "gpipe", 8),
    Case("several", "adamw", "1f1b", 4),
    Case("skip", "sgd", INTERLEAVED, 4),
    Case("frozen", "adamw", "gpipe", 1),
    Case("dropped", micro_batches=1),
    Case("dropped", micro_batches=1, options="recompute"),
    Case("tied", "adamw", "1f1b", 4, "recompute"),
    Case("overflowing", "adamw", options="loss_scale"),
)


@pytest.mark.parametrize("job", [pytest.param(BESIDE_HOROVOD, marks=pytest.mark.full), BESIDE_SERVERS])
def test_two_stages(job: tuple[str, str], float64: None) -> None:
    check_job(job, (TIED, Case("skip", "adamw", "gpipe", 4, "ema")))


@pytest.mark.full
@pytest.mark.parametrize("case", OTHERS, ids=map(str, OTHERS))
def test_other_models(case: Case, float64: None) -> None:
    check_case(BESIDE_HOROVOD, OTHERS, case)


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["horovod", "tensorflow"])
def test_all_three_axes(launcher: str, float64: None) -> None:
    check_job((launcher, "stage:2;data:2;model:2"), (TIED, Case("skip", "sgd", "gpipe", 2)))


VERIFY = (
    "--strategy=pipeline --mesh_shape=stage:2;model:2 --layout=heads:model;ffn:model --micro_batches=2 --recompute=full"
    " --ema=0.9 --model=transformer(layers=2,width=16,heads=2) --dataset=text(length=16) --batch_size=8 --steps=3"
).split()


@pytest.mark.parametrize(
    "flags",
    [
        ("--precision=mixed_bfloat16",),
        pytest.param(
            ("--precision=mixed_float16", "--activation_compression=bf16", "--tolerance=0.1"), marks=pytest.mark.full
        ),
    ],
)
def test_mixed_precision_is_within_its_rounding(flags: tuple[str, ...], tmp_path: pathlib.Path) -> None:
    launch = [sys.executable, "-m", "tfdist.launch", "--processes=2", f"--log_dir={tmp_path}", "--"]
    [output] = processes.finish([*launch, sys.executable, "-m", "tfdist.verify", "--json", *VERIFY, *flags])
    [line] = [line for line in (tmp_path / "rank-0.log").read_text().splitlines() if line.startswith("{")]
    record = json.loads(line)
    assert record["replicas_equal"] and (record["processes"], record["replicas"]) == (2, 1)


def test_a_bit_that_differs_between_replicas_is_found(tmp_path: pathlib.Path) -> None:
    """In a part of a variable that one device has."""
    first, second = running.outcomes(
        "spread_sync", "pipeline(mesh_shape='stage:1;data:2;model:2', layout='in:model')", 2, tmp_path, seconds=100
    )
    assert first == second and "before step 4: model/last/kernel differs: replica 1 of rank 1 from replica 0" in first
