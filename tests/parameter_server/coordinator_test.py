"""Tests of `tfdist.parameter_server.coordinator`."""

import contextlib
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest

from tfdist.config.staleness import Staleness
from tfdist.coordination.calls import Message
from tfdist.errors import PeerLostError
from tfdist.parameter_server.coordinator import Coordinator, Outcome


def worked(coordinator, worker, first, end, losses=float, rows=(1, 1), seconds=None):
    """Takes and commits tickets until the range is done; returns (ticket, version) of each, without dropped shares."""
    coordinator.open(worker, first, end)
    taken = []
    while answer := coordinator.take(worker):
        ticket, version, *_ = answer
        if seconds:
            time.sleep(seconds())
        arrays, loss = [np.array([10 * ticket + worker])] if rows[1] > 1 else [], losses(ticket)
        values = {"versions": [version, version], "rows": rows, "arrays": arrays}
        outcome = coordinator.commit(worker, ticket, loss, math.isfinite(loss), **values)
        taken += [(ticket, version)] if outcome != Outcome.UNUSED else []
    return taken


@pytest.mark.parametrize("bound", [0, 1, None])
def test_every_ticket_is_computed_once_and_applied_within_the_bound(bound):
    coordinator = Coordinator(3, Staleness("bounded", bound))
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
            assert len(updates) == end - first
            assert bound is None or max(update.version - min(update.versions) for update in updates) <= bound


def test_shares_of_all_workers_are_one_update():
    coordinator = Coordinator(3, Staleness())
    with ThreadPoolExecutor(3) as threads:
        taken = list(threads.map(lambda w: worked(coordinator, w, 0, 20, lambda t: t + w, (2, 6)), range(3)))
    assert taken == [[(ticket, ticket) for ticket in range(20)]] * 3
    assert coordinator.result().losses == [3 * ticket + 3 for ticket in range(20)]
    assert [update.workers for update in coordinator.updates(0, 0.0)] == [(0, 1, 2)] * 20
    assert [update.row_factor for update in coordinator.updates(0, 0.0)] == [1.0] * 20
    assert len(coordinator.updates(17, 0.0)) == 3 and not coordinator.updates(20, 0.0)


def test_workers_are_ahead_of_the_slowest_within_the_bound_of_ssp():
    coordinator, random = Coordinator(3, Staleness("ssp", 2)), Random(1)
    seconds = lambda: 3e-3 * (random.random() < 0.2)  # noqa: E731
    with ThreadPoolExecutor(3) as threads:
        for first, end in ((0, 60), (60, 65)):
            work = lambda w, f=first, e=end: worked(coordinator, w, f, e, rows=(w + 1, 6), seconds=seconds)  # noqa: E731
            taken = list(threads.map(work, range(3)))
            versions = [dict(tickets) for tickets in taken]
            assert [[*tickets] for tickets in versions] == [[*range(first, end)]] * 3
            updates = coordinator.result().updates
            for ticket, update in zip(range(first, end), updates, strict=True):
                assert update[:3] == (ticket, ticket, (0, 1, 2)) and update.row_factor == 1.0
                read = [worker_versions[ticket] for worker_versions in versions]
                assert [*update.versions] == [version for version in read for _ in range(2)]  # of two servers
                assert read == [max(ticket - 2, 0)] * 3


def test_late_shares_are_dropped_and_their_worker_goes_on_with_the_newest_ticket():
    coordinator, rows = Coordinator(3, Staleness("backup", workers=1)), [(3, 9), (2, 9), (4, 9)]
    with ThreadPoolExecutor(3) as threads:
        for first, end in ((0, 20), (20, 25)):
            seconds = [lambda: 0.0, lambda: 2e-3, lambda: 9e-3]
            work = lambda w, f=first, e=end: worked(coordinator, w, f, e, lambda t: rows[w][0], rows[w], seconds[w])  # noqa: B023, E731
            used = [{ticket for ticket, _ in tickets} for tickets in threads.map(work, range(3))]
            result = coordinator.result()
            counts = []
            for ticket, update in zip(range(first, end), result.updates, strict=True):
                assert update.workers == tuple(w for w in range(3) if ticket in used[w]) and len(update.workers) == 2
                counts.append(sum(rows[worker][0] for worker in update.workers))
                assert update.row_factor == 9 / counts[-1] and result.losses[ticket - first] == pytest.approx(9)
                assert [*result.example_indices[ticket - first]] == [10 * ticket + worker for worker in update.workers]
            assert result.dropped_rows == sum(9 - count for count in counts)
            assert len(used[2]) < end - first  # it neither computes all tickets nor waits for them


def test_shares_before_one_that_is_not_finite_are_updates_and_others_are_forgotten():
    coordinator = Coordinator(3, Staleness("ssp", 2))
    with ThreadPoolExecutor(3) as threads:
        losses = lambda worker: lambda ticket: np.nan if (worker, ticket) == (1, 12) else 1.0  # noqa: E731
        work = lambda w: worked(coordinator, w, 0, 99, losses(w), (1, 3), lambda: 1e-3 * w)  # noqa: E731
        list(threads.map(work, range(3)))
        result = coordinator.result()
        assert not result.is_finite and [update.ticket for update in result.updates] == [*range(12)]
        assert result.losses[:12] == [3.0] * 12 and math.isnan(result.losses[12])
        work = lambda w: worked(coordinator, w, 12, 14, rows=(1, 3), seconds=lambda: 3e-3 * (2 - w))  # noqa: E731
        taken = list(threads.map(work, range(3)))
    assert [len(tickets) for tickets in taken] == [2] * 3 and coordinator.result().is_finite


def test_a_loss_that_is_not_finite_ends_the_range_for_all_workers():
    coordinator = Coordinator(2, Staleness("async"))
    with ThreadPoolExecutor(2) as threads:
        losses = {12: np.nan}
        list(threads.map(lambda w: worked(coordinator, w, 0, 1000, lambda t: losses.get(t, 1.0)), range(2)))
    result = coordinator.result()
    assert not result.is_finite and len(result.losses) == 13 and math.isnan(result.losses[-1])
    assert 12 not in [update.ticket for update in coordinator.updates(0, 0.0)]


def work_until_lost(coordinator, worker, random, end):
    """Takes and commits tickets until a moment that is drawn; returns the committed ones, and whether the worker is lost."""
    last, stage = random.randrange(3) if worker else end + 1, random.choice(["take", "commit", "wait"])
    coordinator.open(worker, 0, end)
    committed = []
    while True:
        if len(committed) == last and stage == "wait":  # its call stays, as the thread of a handler does
            waits = threading.Thread(target=lambda: caught(coordinator.take, worker), daemon=True)
            waits.start()
            return committed, waits
        answer = coordinator.take(worker)
        if not answer:
            return committed, None
        if len(committed) == last and stage == "take":
            return committed, True
        time.sleep(random.random() * 1e-3)
        arrays = [np.array([answer[0]]), np.array(len(committed) + 1)]
        coordinator.commit(worker, answer[0], 1.0, True, [answer[1]], arrays=arrays)
        committed.append(answer[0])
        if len(committed) == last + 1 and stage == "commit":
            return committed, True


def caught(function, *args):
    with contextlib.suppress(PeerLostError):
        function(*args)


@pytest.mark.parametrize("seed", range(20))
def test_tickets_of_lost_workers_are_computed_once_by_others(seed):
    random, end, bound = Random(seed), 60, (0, 1, 2, None)[seed % 4]
    coordinator = Coordinator(4, Staleness("bounded", bound))

    def work(worker):
        committed, is_lost = work_until_lost(coordinator, worker, Random(seed * 4 + worker), end)
        if is_lost:
            time.sleep(random.random() * 2e-3)
            coordinator.forget(worker)
            for call in (coordinator.take, coordinator.result):
                with pytest.raises(PeerLostError, match="the others continue without it"):
                    call(worker)
        return committed

    with ThreadPoolExecutor(4) as threads:
        committed = [future.result(timeout=20) for future in [threads.submit(work, worker) for worker in range(4)]]
    result = coordinator.result()
    assert sorted(ticket for tickets in committed for ticket in tickets) == [*range(end)]
    assert sorted(update.ticket for update in result.updates) == [*range(end)]
    assert bound is None or max(update.version - min(update.versions) for update in result.updates) <= bound
    assert [indices.tolist() for indices in result.example_indices] == [[ticket] for ticket in range(end)]
    assert [int(total) for total in result.metrics] == [end]  # of lost workers, too
    assert coordinator._lost_workers or bound == 0  # then one worker computes all


def test_gather_goes_on_without_a_lost_worker_and_names_who_took_part():
    coordinator = Coordinator(3, Staleness("async"))
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(coordinator.gather, Message({}, [np.array(w)]), "a", w) for w in (0, 2)]
        coordinator.forget(1)
        answers = [call.result(timeout=20) for call in calls]
    assert [answer.values for answer in answers] == [{"members": [0, 2]}] * 2
    with pytest.raises(PeerLostError, match="the others continue without it"):
        coordinator.gather(Message({}, [np.array(1)]), "a", 1)
    assert [[*map(int, answer.arrays)] for answer in answers] == [[0, 2]] * 2 and not coordinator._gathers


def test_gather_returns_the_arrays_of_all_members_in_order():
    coordinator = Coordinator(3, Staleness())
    with ThreadPoolExecutor(3) as threads:
        for key in ("a", "b"):
            call = lambda member: coordinator.gather(Message({}, [np.array(member)]), key, member, 3)  # noqa: B023, E731
            assert [[*map(int, m.arrays)] for m in threads.map(call, (2, 0, 1))] == [[0, 1, 2]] * 3
    assert not coordinator._gathers


def test_a_range_is_opened_once_all_workers_have_seen_the_result_of_the_one_before():
    coordinator = Coordinator(2, Staleness("async"))
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):  # two models may have the same range
            first = threads.submit(lambda: worked(coordinator, 0, 0, 3))
            with pytest.raises(TimeoutError):
                first.result(0.05)
            taken = [*threads.submit(lambda: worked(coordinator, 1, 0, 3)).result(10), *first.result(10)]
            assert sorted(ticket for ticket, _ in taken) == [0, 1, 2] and coordinator.result().is_finite
