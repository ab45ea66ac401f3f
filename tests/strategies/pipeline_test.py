"""A pipeline of processes gives the same result as one device, in float64: weights, slots, losses, metrics, predictions."""

import functools
import pathlib
import pickle
import tempfile

import numpy as np
import pytest

import tfdist
from tests.strategies.pipeline_cases import Case, Outcome, run_case
from tests.workers import running
from tfdist.config.mesh import parse_mesh

pytestmark = pytest.mark.processes

BOUND = 1e-9
INTERLEAVED = "interleaved(chunks=2)"
Job = tuple[str, str]  # launcher and mesh
TWO, THREE, TWO_BY_TWO = ("tensorflow", "stage:2"), ("horovod", "stage:3"), ("tensorflow", "stage:2;data:2")
COVER = {
    TWO: (
        Case("masked", "sgd", "gpipe", 1),
        Case("tied", "adamw", "1f1b", 4),
        Case("regularized", "sgd", INTERLEAVED, 8, "clip"),
        Case("several", "adamw", "zb_h1", 8),
    ),
    THREE: (
        Case("skip", "adamw", "gpipe", 8),
        Case("tied", "sgd", "1f1b", 1, "clip"),
        Case("frozen", "adamw", INTERLEAVED, 6),
        Case("several", "sgd", "zb_h1", 4),
    ),
    TWO_BY_TWO: (
        Case("masked", "adamw", "gpipe", 4),
        Case("skip", "sgd", "1f1b", 8, "clip"),
        Case("frozen", "sgd", INTERLEAVED, 4),
        Case("regularized", "adamw", "zb_h1", 1),
    ),
}
MASKS = tuple(
    Case("exposing", "gradients", schedule, 4, steps=1) for schedule in ("1f1b", "zb_h1", "gpipe", INTERLEAVED)
)
BESIDE = {
    TWO: (
        Case("several", "adamw", "reversed", 8),
        Case("dropped", micro_batches=1, options="recompute"),
        Case("text", "adamw"),
        Case("looked_up"),
    ),
    THREE: (),
    TWO_BY_TWO: (
        Case("overflowing", "adamw", options="loss_scale"),
        Case("normalized(replicas=2, micro_batches=2)", "adamw", micro_batches=2),
    ),
}
# Of each, another case has all parts on another mesh: random numbers that are recomputed, and statistics of several parts.
MORE = {
    TWO: (Case("normalized(micro_batches=4)", "adamw"),),
    THREE: (Case("tied", "adamw", "1f1b", 4, "recompute"),),
    TWO_BY_TWO: (Case("normalized(replicas=2)", micro_batches=1),),
    ("tensorflow", "stage:4"): (Case("skip", "adamw", "zb_h1", 8), Case("tied", "adamw", INTERLEAVED, 8)),
}
LAYOUT = "heads:model;in:model"  # of meshes with an axis model
FAULTY = (Case("skip", fault="labels"), Case("tied", micro_batches=1, fault="tied"))
CASES = {
    job: (*COVER[job], *BESIDE[job], *(FAULTY if job == TWO else MASKS if job == TWO_BY_TWO else ())) for job in COVER
}


def sizes(mesh: str) -> list[int]:
    """Returns the numbers of stages and replicas."""
    axes = parse_mesh(mesh).axes
    return [axes["stage"], axes.get("data", 1)]


@functools.cache
def outcomes(job: Job, cases: tuple[Case, ...]) -> list[list[Outcome]]:
    """Returns the outcomes of real processes: [rank][case]."""
    launcher, mesh = job
    stages, replicas = sizes(mesh)
    size = stages * replicas
    with tempfile.TemporaryDirectory() as directory:
        pathlib.Path(directory, "cases.pickle").write_bytes(pickle.dumps(cases))
        layout = LAYOUT if "model" in mesh else ""
        strategy, seconds = f"pipeline(mesh_shape='{mesh}', layout='{layout}')", 200 + 100 * len(cases)
        how = (run_case.__module__, "float64")
        return running.launched("cases", strategy, size, directory, *how, seconds=seconds, launcher=launcher)


@functools.cache
def trained_config(case: Case) -> Outcome:
    return run_case(tfdist.load_strategy("single", environment={}), case)


def check(ranks: list[Outcome], case: Case) -> None:
    """Asserts that all processes together have what one device has, up to rounding."""
    compare(ranks, trained_config(case.trained_config))


def compare(ranks: list[Outcome], wanted: Outcome) -> None:
    """Asserts that all processes together have what is wanted, up to rounding."""
    assert set().union(*(rank.variables for rank in ranks)) == set(wanted.variables)
    for rank in ranks:
        for path, value in rank.variables.items():
            check_close(value, wanted.variables[path], path)
        assert len(rank.records) == len(wanted.records)
        for found, expected in zip([*rank.records, rank.evaluation], [*wanted.records, wanted.evaluation], strict=True):
            assert found == pytest.approx(expected, rel=BOUND)
        for found, expected in zip(rank.predictions, wanted.predictions, strict=True):
            check_close(found, expected, "predictions")


def check_close(found: np.ndarray, wanted: np.ndarray, name: str) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=BOUND * np.max(np.abs(wanted), initial=1.0), err_msg=name)


def check_equal_bits(ranks: list[Outcome]) -> None:
    """Asserts that a variable is the same in each process that has it: in all replicas, and in stages that share it."""
    first: dict[str, bytes] = {}
    for rank in ranks:
        for path, value in rank.variables.items():
            assert first.setdefault(path, value.tobytes()) == value.tobytes(), path
        assert (rank.records, rank.evaluation) == (ranks[0].records, ranks[0].evaluation)
        assert [p.tobytes() for p in rank.predictions] == [p.tobytes() for p in ranks[0].predictions]


def check_job(job: Job, cases: tuple[Case, ...]) -> None:
    """Asserts that each case of a job gives the same bits in all processes that have them, and what one device has."""
    for case in cases:
        check_case(job, cases, case)


def check_case(job: Job, cases: tuple[Case, ...], case: Case) -> None:
    """Asserts this of one case."""
    ranks = [rank[cases.index(case)] for rank in outcomes(job, cases)]
    check_equal_bits(ranks)
    check(ranks, case)


def outcome(job: Job, case: Case) -> list[Outcome]:
    """Returns the outcome of a case in each rank of a job that runs all its cases when the first is needed."""
    return [rank[CASES[job].index(case)] for rank in outcomes(job, CASES[job])]


def cases(found: dict[Job, tuple[Case, ...]]) -> pytest.MarkDecorator:
    pairs = [(job, case) for job, some in found.items() for case in some]
    return pytest.mark.parametrize(("job", "case"), pairs, ids=[f"{job[1]}-{case}" for job, case in pairs])


@cases({job: (*COVER[job], *BESIDE[job]) for job in COVER})
def test_a_pipeline_equals_one_device(job: Job, case: Case, float64: None) -> None:
    check_case(job, CASES[job], case)


@pytest.mark.full
@cases(MORE)
def test_so_do_other_combinations(job: Job, case: Case, float64: None) -> None:
    check_case(job, MORE[job], case)


@cases({TWO: FAULTY})
def test_a_faulty_pipeline_does_not(job: Job, case: Case, float64: None) -> None:
    """With labels of the next micro-batch; with gradients of tied weights that are not summed."""
    with pytest.raises(AssertionError):
        check(outcome(job, case), case)


def test_dropout_differs_between_layers_stages_replicas_and_micro_batches() -> None:
    found = []
    for case in MASKS:
        weights = {path: value for rank in outcome(TWO_BY_TWO, case) for path, value in rank.variables.items()}
        found.append(np.stack([weights[f"layer_{i}/rows"] != 1 for i in range(4)]))
    rows = found[0][:, found[0].any(axis=(0, 2))]
    assert rows.shape == (4, 16, 32)
    assert len(np.unique(rows.reshape(-1, 32), axis=0)) == 4 * 16
    for other in found[1:]:  # with other orders of computation
        np.testing.assert_array_equal(found[0], other)
