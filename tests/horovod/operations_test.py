"""Operations of tfdist.horovod on real ranks: dtypes, unusual shapes, gradients, process sets, and calls that do not match."""

import re

import numpy as np
import pytest

from tests.horovod.jobs import FLOATS, IN_GRAPHS, MOVED, REDUCED, STALL_SECONDS, Outcomes, outcomes

pytestmark = pytest.mark.processes

OVER_MPI = pytest.param("mpi", marks=pytest.mark.full)  # what differs there is also tested "in short"
UNSIGNED = "InputError: An object of another rank must be signed with this job's token. Received: another signature"


def in_both_modes(dtypes: tuple[str, ...]) -> list[tuple[str, str]]:
    return [(dtype, "eager") for dtype in dtypes] + [(dtype, "graph") for dtype in dtypes if dtype in IN_GRAPHS]


@pytest.fixture(scope="module", params=["horovod", "without", OVER_MPI])
def ranks(request: pytest.FixtureRequest) -> Outcomes:
    """The results of each rank of an engine's job, or those of the members of a set in it."""
    engine, _, of_a_set = request.param.partition("; ")
    return [rank["inside"] for rank in outcomes(engine)[::2]] if of_a_set else outcomes(engine)


WITH_HOROVOD = pytest.mark.parametrize("ranks", ["horovod", OVER_MPI], indirect=True)
WITHOUT_HOROVOD = pytest.mark.parametrize("ranks", ["without"], indirect=True)
IN_SETS = ["horovod; in a set", "mpi, in short; in a set"]
AND_IN_A_SET = pytest.mark.parametrize("ranks", ["horovod", "without", OVER_MPI, IN_SETS[0]], indirect=True)
BY_LIBRARY = pytest.mark.parametrize("ranks", ["horovod", "mpi, in short", OVER_MPI], indirect=True)


def values(dtype: str, rank: int) -> np.ndarray:
    return np.array([rank == 0, True, False]) if dtype == "bool" else np.arange(1, 4) + rank


def test_who_is_who(ranks, request):
    n, engine = len(ranks), request.node.callspec.params["ranks"]
    assert [rank["who"] for rank in ranks] == [[r, n, r, n, 0, 1, True] for r in range(n)]
    has_horovod, uses_mpi = engine != "without", engine == "mpi"
    assert [rank["built"] for rank in ranks] == [[has_horovod, has_horovod, False, uses_mpi, uses_mpi]] * n


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


@pytest.mark.parametrize("ranks", ["mpi, in short", *IN_SETS], indirect=True)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "bool"])
def test_dtypes_that_mpi_does_not_have_or_that_are_small(ranks, dtype):
    """Horovod sums float16 over MPI by a function of its own."""
    if dtype != "bool":
        test_every_dtype_is_reduced(ranks, dtype, "eager")
    test_every_dtype_is_moved(ranks, dtype, "eager")


@pytest.mark.parametrize("ranks", ["horovod", "without", "mpi, in short", OVER_MPI, *IN_SETS], indirect=True)
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


@AND_IN_A_SET
def test_objects_are_signed(ranks):
    """What another job's process has pickled is not unpickled."""
    assert [rank["altered object"].startswith(UNSIGNED) for rank in ranks] == [True] * (len(ranks) - 1) + [False]
    assert all(rank["altered objects"].startswith(UNSIGNED) for rank in ranks)


def test_signed_objects_are_of_one_call_of_one_rank(ranks):
    """Whoever reaches the engine's connections can send an object again, and none of the ranks unpickles it."""
    started_again = [] if "refused" in ranks[0] else ["object of an earlier start"]
    for name in ("earlier object", "object of another name", *started_again):
        assert [rank[name].startswith(UNSIGNED) for rank in ranks] == [False] + [True] * (len(ranks) - 1)
    assert all(rank["object of another rank"].startswith(UNSIGNED) and rank["object"] == "next" for rank in ranks)


def test_adasum(ranks):
    """For (3, 4) and (0, 2), whose product is 8, the result is (1 - 8 / 50) (3, 4) + (1 - 8 / 8) (0, 2)."""
    for rank in ranks:
        if len(ranks) != 2:
            assert rank["adasum refused"].startswith(
                "NotSupportedError: op=hvd.Adasum takes 2, 4, 8 ... ranks. Received: "
            )
            continue
        assert rank["adasum refused"].startswith("InputError: op=hvd.Adasum takes floats. Received: ")
        for dtype, digits in zip(FLOATS, (1e-3, 1e-2, 1e-6, 1e-12), strict=True):
            np.testing.assert_allclose(rank[f"adasum {dtype}"], [2.52, 3.36], rtol=digits)
        np.testing.assert_allclose(rank["adasum in a graph"], [5.04, 6.72], rtol=1e-6)


def test_init_for_some_ranks_says_what_it_needs(ranks):
    for rank in ranks:
        assert rank["comm"].startswith("InputError: hvd.init(comm=...) needs ")
        assert "Received: " in rank["comm"]


# Factors by which Horovod's registered gradients on n ranks differ from the gradient of the sum of the ranks' losses.
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


@AND_IN_A_SET
@pytest.mark.parametrize("name", RATIOS)
def test_gradients_are_those_of_finite_differences(ranks, name):
    """Compared with differences of the sum of the ranks' losses, times the factor of Horovod's convention."""
    for rank in ranks:
        for ratio, error, size in rank[f"gradient {name}"]:
            assert error < 1e-7, (ratio, error)
            if size > 1e-6:  # otherwise no loss depends on this rank's tensor
                assert ratio == pytest.approx(RATIOS[name](len(ranks)), rel=1e-6)


@BY_LIBRARY
def test_sets_from_the_start_and_one_that_is_added_later(ranks):
    """The mean gradient of ranks 0 and 2 is 3; rank 1 is alone in its set, and takes no part in the optimizer's."""
    assert [rank["inside"]["optimizer"] for rank in ranks] == [[-3.0], [-2.0], [-3.0]]
    for rank in ranks:
        assert "InvalidArgumentError" in rank["inside"]["set of others"]
        assert "ValueError" in rank["inside"]["set unknown"]
    assert [rank["set"] for rank in ranks] == [[2, False], [2, True], [2, True]]
    for rank in ranks[1:]:
        assert rank["set allreduce"] == [5.0]
        assert rank["set root"] == (
            "InvalidArgumentError: root_rank must be one of the ranks [1, 2]. Received: 0. Pass another root_rank."
        )
    assert [rank["set gradient"] for rank in ranks] == [[[1.0]], [[2.5]], [[2.5]]]
    assert [rank["set gradient of maxima"] for rank in ranks] == [[[1.0]], [[3.0]], [[3.0]]]
    assert [rank["set sizes"] for rank in ranks] == [[3, 1]] * 3
    assert [rank["sizes of a set"] for rank in ranks] == [[2, 0], [2, 1], [2, 1]]
    for rank in ranks:
        assert rank["set twice"] == ["ValueError"] * 2
        assert rank["set removed"] == [True, True, False, True, True]
        assert not rank["set of all removed"]


@BY_LIBRARY
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
        ("scattered shape", "FailedPreconditionError: .*Mismatched ALLGATHER tensor shapes"),
        ("scattered row", "FailedPreconditionError: .*Mismatched ALLGATHER tensor shapes"),
        ("scattered rank", "FailedPreconditionError: .*Mismatched ALLGATHER tensor shapes"),
        ("scattered op", "FailedPreconditionError: .*Mismatched ALLGATHER tensor shapes"),
        ("scattered factor", "FailedPreconditionError: .*Mismatched ALLGATHER tensor shapes"),
        ("scattered dtype", "FailedPreconditionError: .*Mismatched data types"),
    ],
)
def test_what_does_not_match_is_an_error_on_every_rank(ranks, kind, message, where):
    for rank in ranks:
        found = rank[f"mismatch {kind} {where}"]
        assert re.search(message, found), found
        if kind.startswith("scattered") and where == "eager":
            assert "every rank must have the same shape, dtype, operation and factors. Received: " in found


@BY_LIBRARY
def test_a_call_that_a_rank_leaves_out_is_named_within_the_deadline(ranks):
    """Guards: with the fix in our build (tfdist/cli/horovod_build.py), Horovod's stall inspector sees ranks under Gloo."""
    for rank in ranks[:-1]:
        assert "the_one_that_is_left_out" in rank["skipped"]
    for rank in ranks:
        assert "Horovod has been shut down" in rank["skipped"]
        assert rank["skipped seconds"] < STALL_SECONDS + 22


@WITH_HOROVOD
def test_a_start_that_is_refused_is_followed_by_one_that_works(ranks):
    """Errors are detected before Horovod starts, because it cannot start again after a failure; the group stays joined."""
    for rank in ranks:
        assert rank["refused starts"] == [
            "A process set must have ranks from 0 to 2. Received: [0, 7]. Remove the other ranks.",
            "The hvd.init argument process_sets differs: rank 0 has [], ranks 1, 2 have [[0]]. It must be the same on every "
            "process.",
        ]


@pytest.mark.parametrize("where", ["eager", "graph"])
def test_slices_of_whole_numbers_keep_their_digits(ranks, where):
    """2 ^ 53 + 1 is not representable in float64; a mean is float64, as in Horovod."""
    n = len(ranks)
    for rank in ranks:
        assert rank[f"integer slices {where}"] == [
            ["int64", [2**53 + 1 + r for r in range(n)]],
            ["float64", [4.0 / n] * n],
        ]


def test_a_reduce_scatter_scales_each_ranks_tensor(ranks):
    """Integers (1 + r, 3) times 0.5 are rounded towards zero before the sum; 16-bit floats are rounded once per rank."""
    n = len(ranks)
    halves, third = sum((1 + r) // 2 for r in range(n)), np.float16(np.float32(3) * np.float32(0.3))
    for rank in ranks:
        scaled = rank["scaled scatter"]
        assert scaled[0] == [halves if r == 0 else n for r in range(n)][rank["who"][0] : rank["who"][0] + 1]
        assert scaled[1] == [float(np.float16(n * float(third)))]
        assert scaled[2] == [int(3.0 / n * scaled[0][0])], "a mean, and a factor behind it"


def test_errors_are_of_horovods_classes(ranks):
    assert ranks[0]["errors"]
    for name, expected, message, *classes in (error for rank in ranks for error in rank["errors"]):
        assert expected in classes, (name, message, classes)
        if name not in (
            "splits of more rows",
            "rows that cannot be divided",
        ):  # raised by the engine itself, at run time
            assert "InputError" in classes, classes
            assert re.search(r"\. Received: .+\. [A-Z]", message), message
            assert "\n" not in message


def test_variables_are_broadcast_in_graphs(ranks):
    """The returned operation can be used as a control dependency."""
    for rank in ranks:
        assert rank["broadcast in tf.function"] == [2.0, 2.0, True]


@WITH_HOROVOD
def test_operations_run_in_a_session_of_tensorflow_1(ranks):
    n = len(ranks)
    for rank in ranks:
        assert rank["broadcast in a session"] == [2.0]
        assert rank["broadcast_ in a session"] == [[2.0], [3]]
        assert rank["operations in a session"] == [[n * (n + 1) / 2], [1.0 + r for r in range(n)], [1.0 * n]]


@WITHOUT_HOROVOD
def test_sessions_of_tensorflow_1_are_refused_in_one_line(ranks):
    for rank in ranks:
        for key in ("broadcast in a session", "broadcast_ in a session", "operations in a session"):
            assert rank[key].startswith("GraphModeError: hvd.")
            assert "in a graph of TensorFlow 1 needs Horovod. Received: a job on" in rank[key]


@WITHOUT_HOROVOD
def test_what_needs_horovod_says_what_to_use(ranks):
    for rank in ranks:
        for message in rank["refused"]:
            assert message.startswith("InputError: "), message
            assert "Horovod. Received: " in message
            assert message.endswith("run `tfdist install_horovod`.") or "remove process_set" in message


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
        assert re.fullmatch(r"FailedPreconditionError: The hvd call \d+ differs: ", start), message
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
