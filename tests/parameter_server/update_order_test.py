"""Tests of `tfdist.parameter_server.update_order`."""

import copy
import itertools

import pytest

from tfdist.parameter_server.update_order import Asynchronous, Synchronous


def reachable(bound, workers, limit):
    """Returns all states of a bounded order within `limit` updates: (version, what each worker does) and their successors.

    A worker is idle, computes from a version, has pushed a gradient that was computed from a version, or is lost. Which push is
    applied is drawn from all interleavings: the check replays each state in a fresh `Asynchronous`.
    """
    start = (0, ("idle",) * workers)
    seen, todo, edges = {start}, [start], {}
    while todo:
        state = todo.pop()
        edges[state] = [*successors(state, bound)]
        for _, following in edges[state]:
            if following not in seen and following[0] <= limit:
                seen.add(following)
                todo.append(following)
    return edges


def order_of(state, bound):
    version, workers = state
    order = Asynchronous(bound)
    for worker, doing in sorted(enumerate(workers), key=lambda each: str(each[1])):
        if doing not in ("idle", "lost"):
            order.version = doing[1]
            order.read(worker, 0)
    order.version = version
    return order


def successors(state, bound):
    version, workers = state
    for worker, doing in enumerate(workers):
        order = order_of(state, bound)
        if doing == "idle":
            if order.may_read(worker, 0):
                yield ("read", worker), (version, replaced(workers, worker, ("computes", version)))
        elif doing[0] == "computes":
            yield ("push", worker), (version, replaced(workers, worker, ("pushed", doing[1])))
            if worker:
                without = version, replaced(workers, worker, "lost")
                order.withdraw(worker)
                assert order._in_flight.keys() == order_of(without, bound)._in_flight.keys()
                yield ("lose", worker), without
        elif doing != "lost":
            order.push(worker, 0)
            update = order.next_update()
            if update is not None:
                assert update.staleness == version - doing[1]
                yield ("update", worker), (version + 1, replaced(workers, worker, "idle"))


def replaced(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_no_interleaving_of_three_workers_exceeds_the_bound_or_waits_forever(bound):
    limit = 9
    edges = reachable(bound, 3, limit)
    staleness = set()
    for state, following in edges.items():
        version, workers = state
        assert following, f"deadlock in {state}"
        in_flight = [doing[1] for doing in workers if doing not in ("idle", "lost")]
        assert all(version - read <= bound for read in in_flight), state
        # No starvation: the oldest gradient, once pushed, can always be applied.
        if in_flight:
            oldest = min(in_flight)
            worker = next(i for i, doing in enumerate(workers) if doing[1] == oldest)
            if workers[worker][0] == "pushed":
                assert ("update", worker) in [action for action, _ in following], state
        for (action, worker), _ in following:
            if action == "update":
                staleness.add(version - workers[worker][1])
    assert max(staleness) == min(
        bound, 2
    )  # the bound is reached: three workers cannot be staler than two updates apiece


def test_a_push_that_would_make_an_older_gradient_late_waits():
    order = Asynchronous(bound=1)
    assert order.read(0, 0) == 0 and order.read(1, 1) == 0
    order.push(0, 0)
    assert order.next_update() == (0, 0, (0,), 0, ())
    assert order.may_read(0, 2) and order.read(0, 2) == 1
    order.push(0, 2)
    assert order.next_update() is None  # worker 1 would then be two updates behind
    order.push(1, 1)
    assert order.next_update() == (1, 1, (1,), 1, ())
    assert order.next_update() == (2, 2, (0,), 1, ())


def test_a_worker_does_not_read_while_its_gradient_waits():
    order = Asynchronous(bound=2)
    order.read(0, 0)
    for ticket in (1, 2):
        order.read(1, ticket)
        order.push(1, ticket)
        assert order.next_update() is not None
    order.read(1, 3)
    order.push(1, 3)
    assert order.next_update() is None and not order.may_read(1, 4)  # worker 0 would be three updates behind
    order.push(0, 0)
    assert [order.next_update().ticket for _ in range(2)] == [0, 3] and order.may_read(1, 4)


def test_a_gradient_that_all_servers_have_is_not_withdrawn():
    order = Asynchronous(bound=1)
    order.read(0, 0), order.read(1, 1)
    order.push(1, 1)
    order.withdraw(1)
    order.withdraw(0)
    assert order.next_update() == (0, 1, (1,), 0, ()) and order.next_update() is None


def test_without_a_bound_every_push_is_applied_at_once():
    order = Asynchronous()
    order.read(0, 0)
    for ticket in range(1, 8):
        order.read(1, ticket)
        order.push(1, ticket)
        assert order.next_update() == (ticket - 1, ticket, (1,), 0, ())
    order.push(0, 0)
    assert order.next_update() == (7, 0, (0,), 7, ())


def test_synchronous_shares_are_one_update_in_the_order_of_ranks():
    for pushes in itertools.permutations(range(3)):
        order = Synchronous(range(3), version=4)
        for worker in pushes:
            assert order.next_update() is None and not order.may_read(worker, 5)
            assert order.read(worker, 4) == 4
            order.push(worker, 4)
        assert order.next_update()[:4] == (4, 4, (0, 1, 2), 0)
        assert order.may_read(0, 5)


def interleavings(order, workers, tickets):
    """Yields (order, tickets, computing workers, actions, updates) of all states: an action begins or ends a share."""
    todo, known = [(order, (0,) * workers, frozenset())], set()
    while todo:
        order, next_tickets, computing = todo.pop()
        actions, updates = [], []
        for worker in range(workers):
            following, ticket = copy.deepcopy(order), next_tickets[worker]
            if worker in computing:
                following.push(worker, ticket)
                updates += [(worker, update) for update in iter(following.next_update, None)]
                state = following, replaced(next_tickets, worker, ticket + 1), computing - {worker}
            else:
                ticket = max(ticket, order.version)  # others may have completed tickets
                if ticket >= tickets or not order.may_read(worker, ticket):
                    continue
                assert following.read(worker, ticket) == max(ticket - order._bound, 0) <= order.version
                state = following, replaced(next_tickets, worker, ticket), computing | {worker}
            actions.append(worker)
            shares = sorted((ticket, sorted(rows)) for ticket, rows in following._rows.items() if rows)
            if (key := repr([following.version, shares, *state[1:]])) not in known:
                known.add(key)
                todo.append(state)
        yield order, next_tickets, computing, actions, updates


@pytest.mark.parametrize(("bound", "needed"), [(0, 3), (1, 3), (2, 3), (0, 2), (0, 1)])
def test_no_interleaving_of_shares_waits_forever_exceeds_the_bound_or_makes_an_update_twice(bound, needed):
    tickets, lead, late, workers_of_updates = 4, 0, False, set()
    for order, next_tickets, computing, actions, updates in interleavings(
        Synchronous(range(3), bound=bound, needed_shares=needed), 3, tickets
    ):
        assert actions or (order.version == tickets and not computing), (next_tickets, computing)
        for ticket in (next_tickets[worker] for worker in computing):
            late |= ticket < order.version
            lead = max(lead, ticket - order.version)
        for worker, update in updates:
            assert update.version == update.ticket == order.version  # once, and in order, after each earlier one
            assert worker in update.workers and [*update.workers] == sorted({*update.workers})
            workers_of_updates.add(update.workers)
    assert lead == bound and late == (needed < 3)
    assert workers_of_updates == {*itertools.combinations(range(3), needed)}


def test_a_late_share_is_ignored_and_one_without_rows_does_not_suffice():
    order = Synchronous(range(3), needed_shares=1)
    for worker in range(3):
        order.read(worker, 0)
    order.push(1, 0, rows=0)
    assert order.next_update() is None
    order.push(2, 0, rows=1)
    assert order.next_update().workers == (1, 2)
    order.push(0, 0)
    assert order.next_update() is None and not order.may_read(0, 0) and order.may_read(0, 1)
