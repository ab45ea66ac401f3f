"""Tests of `tfdist.parameter_server.update_order`."""

import copy
import itertools

import pytest

from tfdist.parameter_server.update_order import (
    Asynchronous,
    Recorded,
    Synchronous,
    Update,
    check_recorded,
)

VERSION = 100  # of a state; ages of weights are relative to it


def reachable(bound, pull_every, workers):
    """Returns all states of a bounded order and their successors, over all interleavings, without a limit of time.

    The state of a worker is (action, age of its weights, tickets computed from them). It is idle, computes, has pushed a
    gradient, or is lost; the age of weights that cannot be used again is None.
    """
    start = (("idle", None, 0),) * workers
    todo, edges = [start], {}
    while todo:
        state = todo.pop()
        if state not in edges:
            edges[state] = [*successors(state, bound, pull_every)]
            todo += [following for _, following in edges[state]]
    return edges


def order_of(state, bound, pull_every):
    order = Asynchronous(bound, VERSION, pull_every=pull_every)
    for worker, (action, age, count) in enumerate(state):
        if age is not None:
            order._last_reads[worker] = VERSION - age, count
        if action in ("computes", "pushed"):
            order._in_flight[worker] = 0, VERSION - age
    return order


def successors(state, bound, pull_every):
    for worker, (action, age, count) in enumerate(state):
        order = order_of(state, bound, pull_every)
        if action == "idle" and order.may_read(worker, 0):
            in_flight = [other_age for other, other_age, _ in state if other in ("computes", "pushed")]
            can_meet_bound = age is not None and any(
                all(position + each <= bound for position, each in enumerate(ages))
                for ages in itertools.permutations([age, *in_flight])
            )
            assert order.keeps_weights(worker) == (can_meet_bound and count < pull_every)
            read_age = VERSION - order.read(worker, 0)
            reads = "keep" if order._last_reads[worker][1] > 1 else "read"
            yield (reads, read_age), replaced(state, worker, ("computes", read_age, order._last_reads[worker][1]))
        elif action == "computes":
            yield ("push", age), replaced(state, worker, ("pushed", age, count))
            if worker:
                without = replaced(state, worker, ("lost", None, 0))
                order.withdraw(worker)
                assert order._in_flight == order_of(without, bound, pull_every)._in_flight
                yield ("lose", age), without
        elif action == "pushed":
            order.push(worker, 0)
            if update := order.next_update():
                assert update.version - update.versions[0] == age
                after = replaced(state, worker, ("idle", age, count))
                yield ("update", age), tuple(older(each, bound, pull_every) for each in after)


def older(worker, bound, pull_every):
    """Returns the state of a worker after an update."""
    action, age, count = worker
    if age is None or (action == "idle" and (age == bound or count == pull_every)):
        return action, None, 0
    return action, age + 1, count


def replaced(values, index, value):
    return (*values[:index], value, *values[index + 1 :])


@pytest.mark.parametrize(("bound", "pull_every"), [(0, 1), (0, 3), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3)])
def test_no_interleaving_of_three_workers_exceeds_the_bound_or_waits_forever(bound, pull_every):
    edges = reachable(bound, pull_every, 3)
    for state, following in edges.items():
        assert following, f"deadlock in {state}"
        ages = sorted((age for action, age, _ in state if action in ("computes", "pushed")), reverse=True)
        assert all(position + age <= bound for position, age in enumerate(ages)), state  # the deadlines can be met
        # No starvation: the oldest gradient, once pushed, can always be applied.
        if ages and any(action == "pushed" and age == ages[0] for action, age, _ in state):
            assert ("update", ages[0]) in [action for action, _ in following], state
    actions = {action for following in edges.values() for action, _ in following}
    assert max(age for action, age in actions if action == "update") == bound  # the bound is reached
    assert ("keep", bound) in actions or bound == 0 or pull_every == 1


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
    assert order.next_update() == Update(0, 1, (1,), (0,)) and order.next_update() is None


def test_without_a_bound_every_push_is_applied_at_once():
    order = Asynchronous()
    order.read(0, 0)
    for ticket in range(1, 8):
        order.read(1, ticket)
        order.push(1, ticket)
        assert order.next_update() == Update(ticket - 1, ticket, (1,), (ticket - 1,))
    order.push(0, 0)
    assert order.next_update() == Update(7, 0, (0,), (0,))


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
    for order, next_tickets, computing, actions, updates in interleavings(Synchronous(needed, bound=bound), 3, tickets):
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
    order = Synchronous(1)
    for worker in range(3):
        order.read(worker, 0)
    order.push(1, 0, rows=0)
    assert order.next_update() is None
    order.push(2, 0, rows=1)
    assert order.next_update().workers == (1, 2)
    order.push(0, 0)
    assert order.next_update() is None and not order.may_read(0, 0) and order.may_read(0, 1)


def recorded(*rows):
    return [Update(version, ticket, (worker,), versions) for version, (ticket, worker, versions) in enumerate(rows)]


RECORDED = recorded((1, 1, (0, 0)), (0, 0, (0, 1)), (3, 1, (1, 2)), (2, 0, (0, 1)))


def test_recorded_updates_are_repeated_in_their_order_and_servers_are_told_how_many_reads_precede_each():
    order = Recorded(RECORDED)
    assert (order.remaining_tickets(0), order.remaining_tickets(1), order.remaining_tickets(2)) == ([0, 2], [1, 3], [])
    assert not order.keeps_weights(0) and order.read(0, 0) == 0
    assert order.keeps_weights(0) and order.read(0, 2) == 0  # from the weights that it has
    order.push(0, 0), order.push(0, 2)
    assert order.next_update() is None
    order.push(1, 1)
    assert [order.next_update().ticket for _ in range(2)] == [1, 0] and order.next_update() is None
    order.push(1, 3)
    assert [order.next_update().ticket for _ in range(2)] == [3, 2] and order.next_update() is None
    assert [order.update_of(ticket).reads for ticket in (1, 0, 3, 2)] == [(2, 1), (1, 1), (0, 1), (0, 0)]


@pytest.mark.parametrize(
    ("updates", "problem"),
    {
        "as recorded": (RECORDED, ""),
        "half a call": (RECORDED[:3], "other calls"),
        "a read before the call": (recorded((0, 0, (0, 0)), (1, 0, (0, 1))), "other calls"),
        "a third worker": (recorded((0, 2, (0, 0))), "another number of workers"),
        "one server": (recorded((0, 1, (0,))), "another number of workers"),
        "a later version": (recorded((0, 1, (0, 1))), "other calls"),
    }.values(),
)
def test_a_range_that_cannot_be_repeated_is_refused(updates, problem):
    found = check_recorded(updates, 0, 2, 2)
    assert found.startswith(problem) and bool(found) == bool(problem)
    assert "min_table_bytes" in check_recorded(RECORDED, 0, 2, 2, has_tables=True)
