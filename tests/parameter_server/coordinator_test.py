"""Tests of `tfdist.parameter_server.coordinator`."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tfdist.parameter_server.coordinator import Coordinator
from tfdist.parameter_server.messages import Message


def worked(coordinator, worker, first, end, losses=float):
    """Takes and commits tickets until the range is done; returns (ticket, version) of each."""
    coordinator.open(worker, first, end)
    taken = []
    while ticket_and_version := coordinator.take(worker):
        ticket = ticket_and_version[0]
        taken.append(ticket_and_version)
        if not coordinator.commit(worker, ticket, losses(ticket), math.isfinite(losses(ticket)), [7]):
            break
    return taken


@pytest.mark.parametrize("bound", [0, 1, None])
def test_every_ticket_is_computed_once_and_applied_within_the_bound(bound):
    coordinator = Coordinator(3, synchronous=False, bound=bound)
    with ThreadPoolExecutor(3) as threads:
        for first, end in ((5, 105), (105, 110)):
            taken = list(
                threads.map(lambda worker, first=first, end=end: worked(coordinator, worker, first, end), range(3))
            )
            result = coordinator.result()
            assert sorted(ticket for tickets in taken for ticket, _ in tickets) == [*range(first, end)]
            assert result.losses == [*range(first, end)] and result.is_finite
            updates = coordinator.updates(first, 0.0)
            assert [update.ticket for update in updates] == [*range(first, end)] or bound != 0
            assert len(updates) == end - first and max(update.staleness for update in updates) <= (
                2 if bound is None else bound
            )


def test_shares_of_all_workers_are_one_update():
    coordinator = Coordinator(3, synchronous=True)
    with ThreadPoolExecutor(3) as threads:
        taken = list(threads.map(lambda worker: worked(coordinator, worker, 0, 20, lambda t: t + worker), range(3)))
    assert taken == [[(ticket, ticket) for ticket in range(20)]] * 3
    assert coordinator.result().losses == [3 * ticket + 3 for ticket in range(20)]
    assert [update.workers for update in coordinator.updates(0, 0.0)] == [(0, 1, 2)] * 20
    assert len(coordinator.updates(17, 0.0)) == 3 and not coordinator.updates(20, 0.0)


def test_a_loss_that_is_not_finite_ends_the_range_for_all_workers():
    coordinator = Coordinator(2, synchronous=False)
    with ThreadPoolExecutor(2) as threads:
        losses = {12: np.nan}
        list(threads.map(lambda w: worked(coordinator, w, 0, 1000, lambda t: losses.get(t, 1.0)), range(2)))
    result = coordinator.result()
    assert not result.is_finite and len(result.losses) == 13 and math.isnan(result.losses[-1])
    assert 12 not in [update.ticket for update in coordinator.updates(0, 0.0)]


def test_gather_returns_the_arrays_of_all_members_in_order():
    coordinator = Coordinator(3, synchronous=True)
    with ThreadPoolExecutor(3) as threads:
        for key in ("a", "b"):
            call = lambda member: coordinator.gather(Message({}, [np.array(member)]), key, member, 3)  # noqa: B023, E731
            assert [[*map(int, m.arrays)] for m in threads.map(call, (2, 0, 1))] == [[0, 1, 2]] * 3
    assert not coordinator._gathered


def test_servers_go_when_all_workers_have_left():
    coordinator = Coordinator(2, synchronous=True)
    coordinator.leave(0)
    assert not coordinator.have_left(2, 0.01)
    coordinator.leave(1)
    assert coordinator.have_left(2, 0.0) and not coordinator.have_left(3, 0.01)


def test_a_range_is_opened_once_all_workers_have_seen_the_result_of_the_one_before():
    coordinator = Coordinator(2, synchronous=False)
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):  # two models may have the same range
            first = threads.submit(lambda: worked(coordinator, 0, 0, 3))
            with pytest.raises(TimeoutError):
                first.result(0.05)
            taken = [*threads.submit(lambda: worked(coordinator, 1, 0, 3)).result(10), *first.result(10)]
            assert sorted(ticket for ticket, _ in taken) == [0, 1, 2] and coordinator.result().is_finite
