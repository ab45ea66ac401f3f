"""Groups of real processes and messages between them, eagerly and in a graph, compared with NumPy."""

import functools
import tempfile

import numpy as np
import pytest
import tensorflow as tf

from tests.workers import running
from tests.workers.groups import DTYPES, values
from tfdist.collectives.process_groups import ProcessGroups, declared_group, distinct_groups
from tfdist.errors import InputError

pytestmark = pytest.mark.processes

JOBS = [("horovod", ("01",)), ("multiworker", ("01", "23")), ("horovod", ("02", "13"))]


@functools.cache
def outcomes(strategy, groups):
    """Returns what each rank has computed."""
    size = sum(map(len, groups))
    declared = [[int(digit) for digit in ranks] for ranks in groups]
    declared += [[rank, (rank + 1) % size] for rank in range(size)]
    with tempfile.TemporaryDirectory() as directory:
        return running.outcomes("groups", f"{strategy}(groups={declared})", size, directory, *groups, seconds=300)


@pytest.fixture(params=JOBS, ids=lambda job: f"{job[0]}{sum(map(len, job[1]))}")
def job(request):
    """Returns the groups of a job, and what each rank has computed."""
    strategy, groups = request.param
    if strategy == "horovod":
        pytest.importorskip("horovod.tensorflow")
    return [[int(digit) for digit in ranks] for ranks in groups], outcomes(strategy, groups)


def test_gradients_are_those_of_all_ranks_or_refused(job):
    groups, ranks = job
    highest, everyone = np.stack([values(rank) for rank in range(len(ranks))]).max(0), range(1, len(ranks) + 1)
    for rank, steps in enumerate(ranks):
        own = next(group for group in groups if rank in group)
        exact = np.full([8, 3], sum(other + 1 for other in own))
        wanted = {
            "sum": exact,
            "gather": exact,
            "root": exact * (rank == own[-1]),
            "max of all": np.where(values(rank) == highest, sum(everyone), 0),
            "gather of all": np.full([8, 3], sum(everyone)),
            "root of all": np.full([8, 3], sum(everyone) * (rank == 0)),
        }
        for found in (step["gradients"] for step in steps):
            for name in ("all_reduce", "all_gather"):
                np.testing.assert_array_equal(found[name], exact)
            for name, gradient in wanted.items():
                if isinstance(found[name], bytes):
                    assert b"is not differentiable. Call tfdist.collectives.all_reduce" in found[name]
                else:
                    np.testing.assert_array_equal(found[name], gradient)


def test_every_operation_of_a_group(job):
    groups, ranks = job
    for rank, steps in enumerate(ranks):
        own = next(group for group in groups if rank in group)
        place, n, size = own.index(rank), len(own), len(ranks)
        x = np.stack([values(other) for other in own])
        share = slice(place * 8 // n, (place + 1) * 8 // n)
        for found in (step["operations"] for step in steps):
            assert found["rank"] == place
            np.testing.assert_allclose(found["sum"], x.sum(0), rtol=1e-5)
            np.testing.assert_allclose(found["scalar"], x[:, 0, 0].sum(), rtol=1e-5)
            np.testing.assert_array_equal(found["constant"], np.full(3, n))
            np.testing.assert_array_equal(found["max"], x.max(0))
            np.testing.assert_allclose(found["mean"], x.mean(0), rtol=1e-5)
            np.testing.assert_array_equal(found["gather"], np.concatenate([values(r)[:r] for r in own]))
            np.testing.assert_allclose(found["scatter"], x.sum(0)[share], rtol=1e-5)
            np.testing.assert_array_equal(found["exchange"], np.concatenate([values(r)[share] for r in own]))
            last = np.concatenate([values(r)[: r + 1] for r in own])
            np.testing.assert_array_equal(found["uneven"], last if place == n - 1 else last[:0])
            np.testing.assert_array_equal(found["root"], x[-1])
            np.testing.assert_allclose(found["everyone"], sum(map(values, range(size))), rtol=1e-5)
            for first in {max(rank - 1, 0), min(rank, size - 2)}:
                np.testing.assert_array_equal(found[f"pair{first}"], values(first) + values(first + 1))


def test_a_group_that_was_not_declared(job):
    _, ranks = job
    for rank, (eager, *_) in enumerate(ranks):
        expected = "Received: ranks [0, 1, 2]; declared: [" if len(ranks) > 3 and rank < 3 else ""
        assert expected in eager["refused"]["error"].decode()


def test_messages_around_a_ring(job):
    _, ranks = job
    for rank, steps in enumerate(ranks):
        for step in steps:
            for name, sender in (("forward", rank - 1), ("backward", rank + 1)):
                expected = values(sender % len(ranks))
                np.testing.assert_array_equal(step[name]["message"], expected)
                assert step[name]["scalar"] == expected[0, 0] and step[name]["scalar"].shape == ()


def test_one_tag_to_two_ranks(job):
    _, ranks = job
    for rank, (_, *compiled) in enumerate(ranks):
        for step in compiled:
            for other in {(rank - 1) % len(ranks), (rank + 1) % len(ranks)}:
                np.testing.assert_array_equal(step["both_neighbors"][f"from{other}"], values(other))


def test_messages_and_sums_in_a_loop(job):
    groups, ranks = job
    for rank, (_, *compiled) in enumerate(ranks):
        own = next(group for group in groups if rank in group)
        turns = [[values((other - turn) % len(ranks)) for other in own] for turn in range(1, 6)]
        for step in compiled:
            np.testing.assert_array_equal(step["loop"]["last"], values((rank - 5) % len(ranks)))
            np.testing.assert_allclose(step["loop"]["sums"], np.mean(turns, axis=1).sum(0), rtol=1e-4, atol=1e-5)


def test_equal_messages_of_which_one_is_not_used(job):
    """TensorFlow merges none of them into another, folds none of them into a constant, and prunes none of them."""
    for step in job[1][1]:
        np.testing.assert_array_equal(step["unused"]["a"], np.zeros(3))


def test_dtypes_of_messages(job):
    for step in job[1][1]:
        assert {"float32", "float64", "bool"} <= step["dtypes"].keys() <= set(DTYPES)
        for dtype, received in step["dtypes"].items():
            np.testing.assert_array_equal(received, np.arange(5).astype(dtype))


def test_steps_repeat_bitwise_and_ranks_are_equal(job):
    groups, ranks = job
    for steps in ranks:
        assert len({step["operations"]["sum"].tobytes() for step in steps}) == 1
    for group in groups:
        assert len({ranks[rank][0]["operations"]["sum"].tobytes() for rank in group}) == 1


def test_groups_are_declared_once():
    assert distinct_groups([[0, 1], [1, 0], [2], [0, 1, 2], [2, 1]], 3) == [(0, 1), (1, 2)]
    with pytest.raises(InputError, match=r"different ranks from 0 to 2. Received: \[0, 3\]"):
        distinct_groups([[0, 3]], 3)
    with pytest.raises(
        InputError, match=r"Received: ranks \[0, 2\]; declared: \[0, 1\]. Add them: .*groups=\[\[0, 2\]"
    ):
        declared_group({(0, 1): "it"}, [2, 0])


def test_calls_of_a_step_with_one_name_are_told_apart():
    groups = ProcessGroups([(0, 1)], 3, 1, tf.distribute.experimental.CommunicationOptions())
    first, again = ([], [])
    for keys in (first, again):
        with tf.Graph().as_default():
            keys.extend(groups.arguments((0, 1), "loss")["instance_key"] for _ in range(3))
    assert first == again and len(set(first)) == 3
