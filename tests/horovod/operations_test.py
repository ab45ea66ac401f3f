"""Operations of tfdist.horovod on real ranks: each dtype, odd shapes, gradients, sets of ranks, and what does not match."""

import json
import pathlib
import re
import sys
from typing import Any

import numpy as np
import pytest

from tfdist.testing import processes

pytestmark = pytest.mark.alone

WORKER = pathlib.Path(__file__).with_name("operations_worker.py")
ENVIRONMENT = {
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "8",
}
FLOATS = ("float16", "bfloat16", "float32", "float64")
REDUCED = ("uint8", "int8", "int32", "int64", *FLOATS)
MOVED = (*REDUCED, "uint16", "int16", "bool", "uint32")
IN_GRAPHS = ("bfloat16", "float32", "int64", "bool")
WITHOUT = pathlib.Path(__file__).with_name("without_horovod.py")
ENGINES = [(3, [str(WORKER)]), (2, [str(WITHOUT), str(WORKER)])]
Outcomes = list[dict[str, Any]]


def in_both_modes(dtypes: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(dtype, "eager") for dtype in dtypes] + [(dtype, "graph") for dtype in dtypes if dtype in IN_GRAPHS]


def outcomes(ranks: int, command: list[str]) -> Outcomes:
    """What each rank found."""
    with processes.job([sys.executable, *command], ranks, ENVIRONMENT) as job:
        ended = job.wait(180)
    assert [end.code for end in ended] == [0] * ranks, "\n".join(end.output for end in ended)
    return [json.loads(next(x for x in end.output.splitlines() if x.startswith('{"who"'))) for end in ended]


@pytest.fixture(scope="module", params=ENGINES, ids=["horovod", "without"])
def ranks(request: pytest.FixtureRequest) -> Outcomes:
    """With Horovod three ranks, without it two."""
    return outcomes(*request.param)


WITH_HOROVOD = pytest.mark.parametrize("ranks", ENGINES[:1], indirect=True, ids=["horovod"])
WITHOUT_HOROVOD = pytest.mark.parametrize("ranks", ENGINES[1:], indirect=True, ids=["without"])


def values(dtype: str, rank: int) -> np.ndarray:
    return np.array([rank == 0, True, False]) if dtype == "bool" else np.arange(1, 4) + rank


def test_who_is_who(ranks):
    n = len(ranks)
    assert [rank["who"] for rank in ranks] == [[r, n, r, n, 0, 1, True] for r in range(n)]
    is_horovod = "refused" not in ranks[0]
    assert [rank["built"] for rank in ranks] == [[is_horovod, False, False, False]] * n


@pytest.mark.parametrize(("dtype", "where"), in_both_modes(REDUCED))
def test_every_dtype_is_reduced(ranks, dtype, where):
    everyone = np.array([values(dtype, rank) for rank in range(len(ranks))])
    mean = everyone.mean(0)
    expected = {
        "Sum": everyone.sum(0),
        "Average": mean if dtype in FLOATS else np.trunc(mean),
        "Min": everyone.min(0),
        "Max": everyone.max(0),
        "Product": everyone.prod(0),
    }
    for op, wanted in expected.items():
        for rank in ranks:
            np.testing.assert_array_equal(rank[f"allreduce {op} {dtype} {where}"], wanted, err_msg=op)
    scattered = [rank.get(f"reducescatter {dtype} {where}") for rank in ranks]
    if dtype != "uint8":
        np.testing.assert_array_equal(np.concatenate(scattered), np.tile(everyone.sum(0), 2))


@pytest.mark.parametrize(("dtype", "where"), in_both_modes(MOVED))
def test_every_dtype_is_moved(ranks, dtype, where):
    n = len(ranks)
    everyone = [values(dtype, rank) for rank in range(n)]
    for r, rank in enumerate(ranks):
        gathered, broadcast, exchanged, split, counts = rank[f"moves {dtype} {where}"]
        np.testing.assert_array_equal(gathered, np.concatenate([x[: i + 1] for i, x in enumerate(everyone)]))
        np.testing.assert_array_equal(broadcast, everyone[-1])
        parts = [np.tile(x, n)[2 * r : 2 * r + 2] for x in everyone]
        np.testing.assert_array_equal(exchanged, np.concatenate(parts))
        np.testing.assert_array_equal(split, [x[r] for x in everyone])
        assert counts == [1] * n


def test_odd_shapes(ranks):
    n = len(ranks)
    uneven = np.arange(2 * n + 1) * n
    dense = sum(np.array([[r + 1.0] * 2] * (r + 1) + [[0.0, 0.0]] * (3 - r)) for r in range(n))
    for r, rank in enumerate(ranks):
        assert rank["scalar allreduce"] == n * (n + 1) / 2
        assert rank["scalar broadcast"] == 2.0
        assert rank["empty allreduce"] == rank["empty allgather"] == rank["empty alltoall"] == [0, 3]
        assert rank["one empty allgather"] == [i for i in range(n) for _ in range(i)]
        assert rank["uneven alltoall"] == [
            [10 * i + j for i in range(n) for j in range(i + 1)] if r == 0 else [],
            [i + 1 for i in range(n)] if r == 0 else [0] * n,
        ]
        rows = slice(0, 3) if r == 0 else slice(2 * r + 1, 2 * r + 3)
        np.testing.assert_array_equal(rank["uneven reducescatter"], uneven[rows])
        assert rank["few rows reducescatter"] == ([5.0] if r == 0 else [])
        np.testing.assert_array_equal(rank["slices sum"], dense)
        np.testing.assert_allclose(rank["slices mean"], dense / n)
        assert rank["factors"] == [3.0 * n]
        assert rank["fp16"] == [1.0], "the digits below float16's are not sent"
        assert rank["average=False"] == [float(n)]
        assert rank["name in the second place"] == [1.0]
        assert rank["grouped"] == [[n, n], n, [n, n, n]]
        assert rank["grouped gather"] == [list(range(n)), [1.5] * (n * (n - 1) // 2)]
        assert rank["grouped scatter"] == [[n], [[n, n]]]
        assert rank["objects"] == [str([{"rank": i} for i in range(n)]), "[1, 'x']"]
        assert rank["variables"] == [[2.0], 1, [1], True]
        assert rank["constants"] == [[[n, n], [1] * n, 0.0]] * 2


def test_adasum(ranks):
    """Of (3, 4) and (0, 2): their product is 8, so (1 - 8 / 50) (3, 4) + (1 - 8 / 8) (0, 2)."""
    for rank in ranks:
        if len(ranks) != 2:
            assert rank["adasum refused"].startswith("InputError: op=hvd.Adasum takes 2, 4, 8 ... ranks. Received: ")
            continue
        assert rank["adasum refused"].startswith("InputError: op=hvd.Adasum takes floats. Received: ")
        for dtype, digits in zip(FLOATS, (1e-3, 1e-2, 1e-6, 1e-12), strict=True):
            np.testing.assert_allclose(rank[f"adasum {dtype}"], [2.52, 3.36], rtol=digits)
        np.testing.assert_allclose(rank["adasum in a graph"], [5.04, 6.72], rtol=1e-6)


def test_init_for_some_ranks_says_what_it_needs(ranks):
    for rank in ranks:
        assert rank["comm"].startswith("InputError: hvd.init(comm=...) needs ")
        assert "Received: " in rank["comm"]


# How many times the gradient of the sum of the ranks' losses Horovod's registered gradients are, of n ranks.
RATIOS = {
    "Sum": lambda n: 1,
    "Average": lambda n: 1,
    "Min": lambda n: 1,
    "Max": lambda n: 1,
    "Product": lambda n: 1,
    "grouped": lambda n: 1,
    "alltoall": lambda n: 1,
    "splits": lambda n: 1,
    "allgather": lambda n: 1 / n,
    "grouped_allgather": lambda n: 1 / n,
    "broadcast": lambda n: 1 / n,
    "reducescatter": lambda n: n,
    "reducescatter mean": lambda n: n,
}


@pytest.mark.parametrize("name", RATIOS)
def test_gradients_are_those_of_finite_differences(ranks, name):
    """Of the sum of the ranks' losses, times what Horovod's convention says."""
    for rank in ranks:
        for ratio, error, size in rank[f"gradient {name}"]:
            assert error < 1e-7, (ratio, error)
            if size > 1e-6:  # else nothing of this rank's is in any loss
                assert ratio == pytest.approx(RATIOS[name](len(ranks)), rel=1e-6)


@WITH_HOROVOD
def test_process_sets(ranks):
    members = [ranks[0], ranks[2]]
    assert [rank["set"] for rank in ranks] == [[2, True], [2, False], [2, True]]
    for rank in members:
        assert rank["set allreduce"] == [4.0]
        assert rank["set allgather"] == [1.0, 3.0]
        assert rank["set broadcast"] == [3.0]
        assert rank["set object"] == "2"
        assert rank["set root"] == (
            "InputError: root_rank must be one of the ranks [0, 2]. Received: 1. Pass another root_rank."
        )
    assert [rank["set reducescatter"] for rank in members] == [[4.0, 4.0], [4.0]]
    assert [rank["set alltoall"] for rank in members] == [[0, 20], [1, 21]]
    assert [rank["set gradient"] for rank in ranks] == [[[2.0]], [[2.0]], [[2.0]]]
    assert [rank["set gradient of maxima"] for rank in ranks] == [[[3.0]], [[2.0]], [[3.0]]]
    assert [rank["set sizes"] for rank in ranks] == [[3, 1]] * 3
    assert [rank["sizes of a set"] for rank in ranks] == [[2, 1], [2, 0], [2, 1]]
    assert all(rank["set removed"] for rank in ranks)


@WITH_HOROVOD
def test_a_rank_that_has_joined_is_not_waited_for(ranks):
    assert [rank["joined"] for rank in ranks[1:]] == [[2.0, 2.0]] * 2


@WITH_HOROVOD
@pytest.mark.parametrize("where", ["eager", "graph"])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("dtype", "Mismatched data types"),
        ("shape", "Mismatched ALLREDUCE tensor shapes"),
        ("op", "Mismatched reduction operation"),
        ("operation", "Mismatched operations"),
        ("root", "Mismatched BROADCAST root ranks"),
        ("row", "Mismatched ALLGATHER tensor shapes"),
        ("alltoall", "Mismatched ALLTOALL tensor shapes"),
        ("scattered shape", "every rank must have the same shape"),
        ("scattered row", "every rank must have the same shape"),
        ("scattered rank", "Mismatched ALLGATHER tensor shapes"),
        ("scattered op", "every rank must have the same shape, operation"),
        ("scattered dtype", "Mismatched data types"),
    ],
)
def test_what_does_not_match_is_an_error_on_every_rank(ranks, kind, message, where):
    for rank in ranks:
        assert message in rank[f"mismatch {kind} {where}"], rank[f"mismatch {kind} {where}"]


@WITH_HOROVOD
def test_a_call_that_a_rank_leaves_out_is_named_within_the_deadline(ranks):
    """Guards: Horovod's stall inspector sees ranks under Gloo, which our build mends (tfdist/horovod_build.py)."""
    for rank in ranks[:-1]:
        assert "the_one_that_is_left_out" in rank["skipped"]
    for rank in ranks:
        assert "Horovod has been shut down" in rank["skipped"]
        assert rank["skipped seconds"] < 30


@WITHOUT_HOROVOD
def test_what_needs_horovod_says_what_to_use(ranks):
    for rank in ranks:
        for message in rank["refused"]:
            assert message.startswith("InputError: "), message
            assert "Horovod. Received: " in message
            assert message.endswith("run `python -m tfdist.install_horovod`.") or "leave out process_set" in message


@WITHOUT_HOROVOD
@pytest.mark.parametrize("where", ["eager", "graph"])
@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("dtype", "Average (times 1 before, 1 after) of float32[2]", "Average (times 1 before, 1 after) of float64[2]"),
        ("shape", "of float32[2]", "of float32[3]"),
        ("op", "Sum (", "Max ("),
        ("operation", "Average (", "gather of float32[rows]"),
        ("root", "broadcast from rank 0 of float32[2]", "broadcast from rank 1 of float32[2]"),
        ("row", "gather of float32[rows, 2]", "gather of float32[rows, 3]"),
        ("factor", "Sum (times 1 before, 1 after)", "Sum (times 2 before, 1 after)"),
        ("alltoall", "exchange of float32[rows, 2]", "exchange of float32[rows, 3]"),
        ("name", "that: ", "this: "),
    ],
)
def test_without_horovod_calls_that_differ_are_named_on_every_rank(ranks, kind, first, second, where):
    for rank in ranks:
        message = rank[f"mismatch {kind} {where}"]
        start, *said = re.split(r"rank [01] has ", message)
        assert re.fullmatch(r"InputError: The hvd call \d+ differs: ", start), message
        assert first in said[0], message
        assert second in said[1], message
        assert rank["after mismatches"] == [2.0, 2.0]


@WITHOUT_HOROVOD
def test_without_horovod_a_call_that_a_rank_leaves_out_is_named_within_the_deadline(ranks):
    assert "the_one_that_is_left_out" in ranks[0]["left out"]
    assert "what_comes_next" in ranks[1]["left out"]
    for rank in ranks:
        assert rank["left out"].startswith("PeerLostError: The hvd call ")
        assert rank["left out seconds"] < 30
