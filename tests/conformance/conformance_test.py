"""N replicas give the same result as one device.

Every strategy runs the same cases. In float64 each variable agrees with a single device's to 1e-9, where rounding is 1e-15
and a bug causes 1e-3 or more; in float32 to 1e-5 of its norm. A new strategy is added by one line in `IN_PROCESS` or
`IN_PROCESSES`.
"""

import functools
import itertools
import pathlib
import pickle
import tempfile
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest

import tfdist
from tests.selection import cover, uncovered
from tests.workers import running
from tfdist import testing
from tfdist.gradients import Clip

pytestmark = pytest.mark.separable

IN_PROCESS = ("mirrored2", "mirrored4")
OVER_MPI = "horovod(communication='mpi')"
IN_PROCESSES = (("multiworker", 2), ("horovod", 2), ("horovod", 3), (OVER_MPI, 2))
# One server beside rank 0; of whole batches in turn, the updates are those of one device.
SERVED, SERVED_WHOLE = ("parameter_server(servers=0)", 2), ("parameter_server(servers=0, staleness='bounded(0)')", 2)
HALVES = {
    ("multiworker", 2): testing.CASES[::2],
    ("horovod", 3): testing.CASES[1::2],
    (OVER_MPI, 2): testing.CASES[::8],
}
HALVES |= {SERVED: testing.CASES[::3], SERVED_WHOLE: testing.CASES[1::3]}
LAYOUTS = (  # with sequence, context and expert parallelism
    ("deep_transformer", "data:2;model:2", "heads:model;ffn:model;sequence:model"),
    ("deep_transformer", "data:1;model:2;context:2", "heads:model;ffn:model;sequence:context;context:context"),
    ("experts", "data:2;model:2", "heads:model;ffn:model;sequence:model;experts:model"),
    ("experts", "data:2;model:2", "experts:data;expert_ffn:model"),
)
FULL_LAYOUTS = (
    ("deep_transformer", "data:1;model:4", "ffn:model;vocab:model"),
    ("deep_transformer", "data:2;context:2", "sequence:context;context:context"),
    ("deep_transformer", "data:1;context:4", "sequence:context;context:context"),
    ("experts", "data:4", "experts:data"),
    ("experts", "data:1;model:4", "experts:model"),
    ("experts", "data:2;context:2", "experts:data;sequence:context;context:context"),
)
ON_A_MESH = "mesh_shape='data:2;model:2', layout='heads:model;ffn:model;in:model;experts:model'"
MESH_IN_PROCESSES = f"mesh({ON_A_MESH})"
SHARDED_IN_PROCESSES = f"mesh({ON_A_MESH}, shard='parameters', shard_min_elements=1)"
STAGES = ("none", "optimizer", "gradients", "parameters")
PAIRWISE = tuple(  # any two of model, mesh, optimizer and what is sharded are in some case
    (mesh, STAGES[(i + j) % 4], testing.Case(model=model, optimizer=("sgd", "adamw")[(i + j // 2) % 2]))
    for i, model in enumerate(("experts", "mlp", "cnn", "mlp"))  # a transformer without experts is in the product
    for j, mesh in enumerate(testing.MESHES)
)
BESIDE = (  # optimizers with norms, masks, regularizers, sample weights
    ("2x2", "gradients", testing.Case(model="mlp", optimizer="lamb")),
    ("1x4", "none", testing.Case(model="mlp", optimizer="lamb", weighted=True)),
    ("2x2x1", "none", testing.Case(model="mlp", optimizer="lars")),
    ("2x2", "parameters", testing.Case(model="masked", optimizer="sgd")),
    ("2x2x1", "none", testing.Case(model="regularized", optimizer="sgd")),
)
MESH_PRODUCT = tuple(
    testing.Case(model=model, optimizer=optimizer)
    for model in ("mlp", "deep_transformer", "experts", "cnn", "masked", "regularized")
    for optimizer in ("sgd", "adamw")
)
MESH_PRODUCT_IN_PROCESSES = tuple(case for case in MESH_PRODUCT if case.model != "cnn")
# Sharding is the same for any variable, so that experts, whose steps take longest to compile, are not sharded twice.
LONG_PAIRS = tuple(one for one in PAIRWISE if one[2].model == "experts" and one[1] in ("gradients", "parameters"))
SHORT_CASES = tuple(case for case in testing.CASES if case.model not in testing.LANGUAGE_MODELS)
QUICK_IN_PROCESS = {
    "mirrored2": SHORT_CASES[::2],
    "mirrored4": SHORT_CASES[1::2],
}  # experts: on three processes of Horovod
FLOAT32 = tuple(testing.Case(model=model, optimizer="sgd", batch_size=13) for model in ("mlp", "cnn", "transformer"))
DEEP = ("mlp", "cnn", "cnn_frozen", "deep_transformer", "experts", "masked", "regularized")
CASES_PER_JOB = 8  # of the product on processes
PRODUCT = tuple(
    testing.Case(model=model, optimizer=optimizer, batch_size=batch_size, weighted=weighted)
    for model, optimizer, batch_size, weighted in itertools.product(DEEP, testing.OPTIMIZERS, (16, 13), (False, True))
    if not (weighted and (model in testing.LANGUAGE_MODELS or model == "masked"))
)
# Strategies, with numbers of processes, or 0 for logical devices, and precisions, which run a cover of the product.
PLACES = (
    *((strategy, 0, "float64") for strategy in IN_PROCESS),
    *((*job, "float64") for job in IN_PROCESSES),
    *((strategy, size, "float32") for strategy, size in (("mirrored2", 0), ("multiworker", 2), ("horovod", 2))),
)
Place = tuple[str, int, str]
POSSIBLE = {
    (place, case.model, case.optimizer, (case.batch_size, case.weighted)): (place, case)
    for place, case in itertools.product(PLACES, PRODUCT)
}
CHOSEN = [POSSIBLE[one] for one in cover(POSSIBLE, 3)]
POSSIBLE_ON_MESHES = {
    (stage, mesh, case.model, case.optimizer): (stage, mesh, case)
    for stage, mesh, case in itertools.product(STAGES, testing.MESHES, MESH_PRODUCT)
}
CHOSEN_ON_MESHES = [POSSIBLE_ON_MESHES[one] for one in cover(POSSIBLE_ON_MESHES, 3)]


@functools.cache
def reference(case: testing.Case, floatx: str) -> testing.Outcome:
    """Returns a single device's outcome, computed once."""
    assert keras.config.floatx() == floatx
    return testing.run_case(tfdist.load_strategy("single", environment={}), case)


@functools.cache
def outcomes(strategy: str, size: int, floatx: str, cases: tuple[testing.Case, ...]) -> list[list[testing.Outcome]]:
    """Returns the outcomes of real processes: [rank][case]."""
    with tempfile.TemporaryDirectory() as directory:
        plan = pathlib.Path(directory, "cases.pickle")
        plan.write_bytes(pickle.dumps(cases))
        seconds = 60 + 30 * len(cases)
        return running.outcomes("cases", strategy, size, directory, testing.__name__, floatx, seconds=seconds)


def assert_same(outcome: testing.Outcome, case: testing.Case, bound: float = 1e-9) -> None:
    """Asserts that the outcome equals a single device's in float64, up to rounding."""
    assert_equal(outcome, reference(case, "float64"), bound)


def assert_equal(outcome: testing.Outcome, expected: testing.Outcome, bound: float = 1e-9) -> None:
    """Asserts max|a - b| <= bound max(1, max|a|) for every variable, and the same losses and evaluation."""
    for path, a in expected.variables.items():
        b = outcome.variables[path]
        assert np.max(np.abs(a - b), initial=0) <= bound * max(1.0, np.max(np.abs(a), initial=0)), path
    assert outcome.losses == pytest.approx(expected.losses, rel=bound)
    assert outcome.evaluation == pytest.approx(expected.evaluation, rel=bound)


def assert_same_in_float32(outcome: testing.Outcome, case: testing.Case) -> None:
    """Asserts ||a - b|| <= 1e-5 ||a|| + 1e-7 for every variable, except those whose true gradient is zero."""
    for path, a in reference(case, "float32").variables.items():
        if not testing.is_noise(path, case.model):
            assert np.linalg.norm(a - outcome.variables[path]) <= 1e-5 * np.linalg.norm(a) + 1e-7, path


def check_processes(strategy: str, size: int, floatx: str, cases: tuple[testing.Case, ...], number: int) -> None:
    """Runs all cases as one job on the first call, and checks one of them."""
    ranks = [rank[number] for rank in outcomes(strategy, size, floatx, cases)]
    assert len({rank.digests[0] for rank in ranks}) == 1, "ranks differ bitwise"
    for rank in ranks:
        {"float64": assert_same, "float32": assert_same_in_float32}[floatx](rank, cases[number])


def check_job(strategy: str, size: int, floatx: str, cases: tuple[testing.Case, ...]) -> None:
    """Runs the cases as one job, and checks all of them."""
    for number in range(len(cases)):
        check_processes(strategy, size, floatx, cases, number)


def on_a_mesh(mesh: tuple[str, str], model: str, stage: str = "none", **options: str) -> tfdist.Strategy:
    """Returns a strategy on a mesh of four devices; kernels of convolutions are replicated."""
    shape, layout = mesh
    options |= {"mesh_shape": shape, "layout": "" if model == "cnn" else layout, "shard": stage}
    return tfdist.load_strategy("mesh", environment={}, shard_min_elements=1, **options)


def of_devices(floatx: str) -> list[tuple[str, testing.Case]]:
    return [(place[0], case) for place, case in CHOSEN if place[1:] == (0, floatx)]


def in_jobs(cases: Sequence[testing.Case]) -> list[tuple[testing.Case, ...]]:
    """Divides cases into jobs, few enough for each to take a minute."""
    return [tuple(cases[start : start + CASES_PER_JOB]) for start in range(0, len(cases), CASES_PER_JOB)]


def of_processes() -> list[tuple[Place, tuple[testing.Case, ...]]]:
    """Returns the chosen cases on processes, job by job."""
    found = {place: [case for at, case in CHOSEN if at == place] for place in PLACES if place[1]}
    return [(place, job) for place, cases in found.items() for job in in_jobs(cases)]


def named(value: object) -> str:
    return "_".join(map(str, value)) if isinstance(value, tuple) else str(value)


def thorough(short: bool, *values: object) -> Any:
    """Returns parameters of a test; `make test` includes only the short ones."""
    return pytest.param(*values, marks=() if short else pytest.mark.full)


@pytest.mark.parametrize(
    ("strategy", "case"),
    [
        thorough(case in QUICK_IN_PROCESS[strategy], strategy, case)
        for strategy, case in itertools.product(IN_PROCESS, testing.CASES)
    ],
    ids=str,
)
def test_logical_devices(strategy: str, case: testing.Case, float64: None, request: pytest.FixtureRequest) -> None:
    """Each case on two or on four replicas; the product has each on both."""
    outcome = testing.run_case(request.getfixturevalue(strategy), case)
    assert len(set(outcome.digests)) == 1, "replicas differ bitwise"
    assert_same(outcome, case)


@pytest.mark.processes
@pytest.mark.parametrize(("strategy", "size"), HALVES)
def test_processes(strategy: str, size: int, float64: None) -> None:
    """Each case on one kind of processes; the product has each on all."""
    check_job(strategy, size, "float64", HALVES[strategy, size])


@pytest.mark.parametrize(
    ("mesh", "stage", "case"), [thorough(one not in LONG_PAIRS, *one) for one in (*PAIRWISE, *BESIDE)], ids=str
)
def test_meshes(mesh: str, stage: str, case: testing.Case, float64: None) -> None:
    assert_same(testing.run_case(on_a_mesh(testing.MESHES[mesh], case.model, stage), case), case)


def test_the_cases_of_meshes_are_a_pairwise_cover() -> None:
    found = [(mesh, stage, case.model, case.optimizer) for mesh, stage, case in PAIRWISE]
    values = (testing.MESHES, STAGES, ("mlp", "cnn", "experts"), ("sgd", "adamw"))
    for a, b in itertools.combinations(range(4), 2):
        assert {(one[a], one[b]) for one in found} == set(itertools.product(values[a], values[b]))


@pytest.mark.parametrize(
    ("model", "shape", "layout"), [thorough(number == 1, *one) for number, one in enumerate(LAYOUTS)]
)
def test_layouts_of_activations(model: str, shape: str, layout: str, float64: None) -> None:
    case = testing.Case(model=model, optimizer="adamw")
    assert_same(testing.run_case(on_a_mesh((shape, layout), model), case), case)


@pytest.mark.parametrize("stage", ["gradients", "parameters"])
def test_the_norm_that_clips_is_that_of_all_parts(stage: str, single: tfdist.Strategy, float64: None) -> None:
    case, clip = testing.Case(model="mlp", optimizer="sgd"), Clip(norm=0.05)
    clipped = testing.run_case(single, case, clip=clip)
    strategy = on_a_mesh(testing.MESHES["2x2"], case.model, stage)
    assert_equal(testing.run_case(strategy, case, clip=clip), clipped)
    with pytest.raises(AssertionError):
        assert_same(clipped, case)


def test_sharded_gradients_are_accumulated(float64: None) -> None:
    case = testing.Case(model="mlp", optimizer="adamw")
    strategy = on_a_mesh(testing.MESHES["2x2"], case.model, "gradients")
    assert_same(testing.run_case(strategy, case, accumulate_steps=2), case)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "case"),
    [
        (MESH_IN_PROCESSES, testing.Case(model="experts", optimizer="adamw")),
        pytest.param(
            SHARDED_IN_PROCESSES,
            testing.Case(model="mlp", optimizer="adamw"),
            marks=pytest.mark.smoke("mesh", "dtensor"),
        ),
    ],
    ids=["experts", "sharded"],
)
def test_a_mesh_over_processes(strategy: str, case: testing.Case, float64: None) -> None:
    check_processes(strategy, 2, "float64", (case,), 0)


def test_a_mesh_in_float32(mesh2x2: tfdist.Strategy) -> None:
    case = testing.Case(model="transformer", optimizer="sgd")
    assert_same_in_float32(testing.run_case(mesh2x2, case), case)


def test_with_keras_own_update_a_mesh_fails(
    mesh1x4: tfdist.Strategy, float64: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sharded kernels and replicated biases, a step does not read what it has assigned."""
    for half in ("gradients", "apply"):  # a gradient with its variable's layout is not affected
        monkeypatch.setattr(type(mesh1x4), half, getattr(tfdist.Strategy, half))
    case = testing.Case(model="mlp", optimizer="adamw")
    worst = testing.compare(testing.run_case(mesh1x4, case).variables, reference(case, "float64").variables, "mlp")[0]
    assert worst.relative > 1e-3


@pytest.mark.parametrize(
    "case", [thorough(case.model not in testing.LANGUAGE_MODELS, case) for case in FLOAT32], ids=str
)
def test_logical_devices_in_float32(case: testing.Case, mirrored2: tfdist.Strategy) -> None:
    assert_same_in_float32(testing.run_case(mirrored2, case), case)


def test_without_reduction_the_suite_fails(mirrored2: tfdist.Strategy, float64: None) -> None:
    outcome = testing.run_case(mirrored2, testing.CASES[0], compression=testing.NoReduction())
    assert len(set(outcome.digests)) == 2
    with pytest.raises(AssertionError):
        assert_same(outcome, testing.CASES[0])


def test_with_keras_second_sum_the_suite_fails(
    mirrored2: tfdist.Strategy, float64: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfdist.keras_internals.disable_gradient_aggregation", lambda optimizer: None)
    outcome = testing.run_case(mirrored2, testing.CASES[0])
    worst = testing.compare(outcome.variables, reference(testing.CASES[0], "float64").variables, "mlp")[0]
    assert worst.relative > 0.1


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "case"), of_devices("float64"), ids=str)
def test_product_on_logical_devices(
    strategy: str, case: testing.Case, float64: None, request: pytest.FixtureRequest
) -> None:
    outcome = testing.run_case(request.getfixturevalue(strategy), case)
    assert len(set(outcome.digests)) == 1
    assert_same(outcome, case)


def test_the_product_is_covered() -> None:
    """Any three of place, model, optimizer, and rows with or without weights; so each case runs somewhere."""
    chosen = [(place, case.model, case.optimizer, (case.batch_size, case.weighted)) for place, case in CHOSEN]
    assert not uncovered(chosen, POSSIBLE, 3)
    assert {case for _, case in CHOSEN} == {*PRODUCT}
    assert len(chosen) < len(POSSIBLE) / 2.5
    on_meshes = [(stage, mesh, case.model, case.optimizer) for stage, mesh, case in CHOSEN_ON_MESHES]
    assert not uncovered(on_meshes, POSSIBLE_ON_MESHES, 3)
    run = [(place, case) for place, cases in of_processes() for case in cases]
    run += [((strategy, 0, floatx), case) for floatx in ("float64", "float32") for strategy, case in of_devices(floatx)]
    assert sorted(map(str, run)) == sorted(map(str, CHOSEN))


@pytest.mark.full
@pytest.mark.parametrize(("model", "shape", "layout"), [*LAYOUTS, *FULL_LAYOUTS])
@pytest.mark.parametrize("optimizer", ["sgd", "lamb"])
def test_product_of_layouts_of_activations(model: str, shape: str, layout: str, optimizer: str, float64: None) -> None:
    case = testing.Case(model=model, optimizer=optimizer)
    assert_same(testing.run_case(on_a_mesh((shape, layout), model), case), case)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "mesh", "case"), CHOSEN_ON_MESHES, ids=str)
def test_product_on_meshes(stage: str, mesh: str, case: testing.Case, float64: None) -> None:
    assert_same(testing.run_case(on_a_mesh(testing.MESHES[mesh], case.model, stage), case), case)


@pytest.mark.full
@pytest.mark.parametrize("strategy", [MESH_IN_PROCESSES, SHARDED_IN_PROCESSES], ids=["whole", "sharded"])
@pytest.mark.parametrize("cases", in_jobs(MESH_PRODUCT_IN_PROCESSES), ids=named)
def test_product_on_a_mesh_over_processes(strategy: str, cases: tuple[testing.Case, ...], float64: None) -> None:
    check_job(strategy, 2, "float64", cases)


@pytest.mark.full
@pytest.mark.parametrize("stage", ["optimizer", "gradients", "parameters"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_product_of_hybrid_sharding(stage: str, optimizer: str, float64: None) -> None:
    """State is sharded within each pair of devices that share their sequences, and replicated across the pairs."""
    pairs = ("data:2;pair:2", "sequence:pair;context:pair")
    strategy = on_a_mesh(pairs, "deep_transformer", stage, shard_axis="pair")
    case = testing.Case(model="deep_transformer", optimizer=optimizer)
    assert_same(testing.run_case(strategy, case), case)


@pytest.mark.full
@pytest.mark.parametrize("case", MESH_PRODUCT, ids=str)
def test_product_on_a_mesh_in_float32(case: testing.Case) -> None:
    assert_same_in_float32(testing.run_case(on_a_mesh(testing.MESHES["2x2"], case.model), case), case)


@pytest.mark.full
@pytest.mark.parametrize(("place", "cases"), of_processes(), ids=named)
def test_product_on_processes(place: Place, cases: tuple[testing.Case, ...], request: pytest.FixtureRequest) -> None:
    if place[2] == "float64":
        request.getfixturevalue("float64")
    check_job(*place, cases)


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "case"), of_devices("float32"), ids=str)
def test_product_on_logical_devices_in_float32(
    strategy: str, case: testing.Case, request: pytest.FixtureRequest
) -> None:
    assert_same_in_float32(testing.run_case(request.getfixturevalue(strategy), case), case)


@pytest.mark.full
@pytest.mark.parametrize("case", testing.SLOW_CASES, ids=str)
def test_slow_cases_on_logical_devices(case: testing.Case, mirrored2: tfdist.Strategy, float64: None) -> None:
    """Tolerance 1e-7: ResNet-50's last stage normalizes over 8 values, so that rounding grows to 5e-9 in 3 steps."""
    outcome = testing.run_case(mirrored2, case)
    assert len(set(outcome.digests)) == 1
    assert_same(outcome, case, bound=1e-7)
