import pytest

from tests.launcher.job_result_test import EndedProcess
from tfdist.launcher import orders
from tfdist.launcher.job import Outcome
from tfdist.launcher.orders import Report


def signaled(rank: int, code: int = 137) -> EndedProcess:
    return EndedProcess(rank, code, signaled=True)


@pytest.mark.parametrize(
    "ends, cause, count",
    [
        ([EndedProcess(0, 0), EndedProcess(1, 0)], Outcome(0), 0),
        ([EndedProcess(0, 5), EndedProcess(1, 137)], Outcome(137, "", 1), 1),
        ([EndedProcess(0, 1), EndedProcess(1, 1)], Outcome(1, "", 0), 2),
        ([EndedProcess(0, 5), signaled(1)], Outcome(1, "", 1), 1),  # its goodbye preceded its end
        ([EndedProcess(0, 5), signaled(1), EndedProcess(2, 5)], Outcome(5, "", 1), 1),  # silent, or did not join
        ([EndedProcess(0, 5), signaled(1)], Outcome(5, "", 0), 0),  # losing a peer is not a failure
        ([EndedProcess(0, 4), signaled(1)], Outcome(4, "", 1), 0),  # a stalled rank waits for another
        ([signaled(0), signaled(1)], Outcome(5), 0),
        ([signaled(0), signaled(1)], Outcome(1, "", 2), 0),  # a rank of another node
    ],
)
def test_who_has_died_of_a_failure_of_its_own(ends, cause, count):
    assert orders.count_local_failures(ends, cause) == count


def report(code: int, rank: int | None = None, failed_count: int = 0) -> Report:
    return Report(Outcome(code, "why", rank), failed_count=failed_count)


@pytest.mark.parametrize(
    "a, b, failed_count",
    [
        (report(1, 2), report(1), (0, 1)),  # b was notified by a
        (report(1, 2), report(1, 2, failed_count=2), (0, 2)),
        (report(1), report(1, 0), (0, 0)),  # only the server of the group knows other ranks
        (report(5, 2), report(5), (0, 1)),
        (report(5, 0), report(5, 2), (0, 0)),  # each has lost the other
        (report(5, 0, failed_count=1), report(5), (1, 0)),
        (report(4, 2), report(4), (0, 0)),
        (report(75), report(75, 0), (0, 0)),
        (report(1, 3), report(1, -1), (0, 0)),  # no launcher's ranks
    ],
)
def test_a_rank_that_the_first_launcher_names_is_dead_for_its_own(a, b, failed_count):
    assert orders.failures_by_launcher({"a": 2, "b": 1}, {"a": a, "b": b}) == dict(zip("ab", failed_count, strict=True))


@pytest.mark.parametrize(
    "rank, absent, failed_count",
    [
        (1, (1, 2, 3, 4), (1, 3)),
        (2, (2, 3), (0, 2)),
        (0, (2, 3), (0, 0)),  # another rank is the cause
        (2, (2, 9, -1), (0, 1)),  # no launcher's ranks
    ],
)
def test_ranks_that_never_came_are_dead_all_at_once(rank, absent, failed_count):
    reports = {"a": Report(Outcome(5, "why", rank), absent=absent), "b": Report(Outcome(5))}
    assert orders.failures_by_launcher({"a": 2, "b": 3}, reports) == dict(zip("ab", failed_count, strict=True))
