"""Rules for late gradients, pulls every few steps, and replays, with workers and servers in threads, over TCP."""

import contextlib
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import keras
import numpy as np
import pytest

from tests.parameter_server.variable_server_test import options_of, serving
from tfdist.config.staleness import LateGradients, Staleness, parse_staleness
from tfdist.coordination import calls
from tfdist.parameter_server.coordinator import Coordinator, Outcome
from tfdist.parameter_server.servers import Servers
from tfdist.parameter_server.variable_server import VariableServer

pytestmark = pytest.mark.usefixtures("float64")
WORKERS, TICKETS, SIZE = 3, 24, 500
WEIGHTS = [np.linspace(0.5, 1.0, SIZE), np.linspace(-1.0, 1.0, SIZE)]  # one on each of two servers


@dataclasses.dataclass
class Job:
    """A coordinator and two servers."""

    coordinator: Coordinator
    servers: list[VariableServer]
    workers: list[Servers]


@contextlib.contextmanager
def job(staleness):
    coordinator = Coordinator(WORKERS, parse_staleness(staleness))

    def create(number):
        return VariableServer(coordinator.updates, lambda key, value: value)

    with serving(create, 2, WORKERS, coordinator=coordinator) as (servers, workers):
        for worker in workers:
            worker.place([("weight", value.nbytes) for value in WEIGHTS], [("state", 8)])
        forms = {number: (f"weight{number}", None, False) for number in range(2)}
        options = options_of(keras.optimizers.SGD(0.3, momentum=0.9))
        workers[0].define(dict(enumerate(WEIGHTS)), [np.ones([1])], forms, {}, **options)
        yield Job(coordinator, servers, workers)


def work(running, rank, seed, updates=()):
    """Computes tickets as a worker does, with delays that are drawn; the gradient depends on the weights and the ticket."""
    worker, random, applied, values = running.workers[rank], Random(seed), 0, ()
    if not rank:
        worker.write({}, version=0)
    worker.coordinate("open", worker=rank, first=0, end=TICKETS, updates=updates)
    answer = worker.coordinate("take", worker=rank)
    while answer:
        ticket, version, *_ = answer
        values = values if version is None else worker.pull(version)
        versions, weights, [state], _ = values
        time.sleep(random.random() ** 6 * 0.06)
        gradients = [np.sin(weight * (ticket + 1)) for weight in weights]
        arrays = [np.array([ticket]), np.array(applied + 1)]
        states = [(state, state * 0.5 + ticket)]
        pushes = worker.push_messages(ticket, versions, gradients, states, methods=["none", "none"])
        committed = {"loss": float(ticket), "is_finite": True, "versions": versions}
        outcome, answer = worker.commit(ticket, arrays, pushes, **committed)
        applied += outcome == Outcome.APPLIED
        if outcome == Outcome.REJECTED:
            worker.discard(ticket)
    return worker.result()


def train(staleness, seed, updates=()):
    """Returns the values after all tickets by key, and the result."""
    with ThreadPoolExecutor(WORKERS) as threads, job(staleness) as running:
        calls = [threads.submit(work, running, rank, seed + rank, updates) for rank in range(WORKERS)]
        result = [call.result(timeout=20) for call in calls][0]
        worker = running.workers[0]
        worker.pull(TICKETS)
        keys = ["weight/0", "weight/1", "slot/0/0", "slot/1/0", "state/0", "optimizer/0"]
        values = {key: value.tobytes() for key, value in worker.fetch(keys).items()}
        assert not any(server._gradient_messages for server in running.servers)  # nor those that were rejected
    return values, result


RULES = {
    "async(late=scale(0.5), pull_every=3)": lambda updates: {update.factor for update in updates} > {1.0},
    "async(late=reject(after=0), pull_every=2)": lambda updates: {update.factor for update in updates} == {1.0},
    "async(late=reject(after=0, rows=dropped))": lambda updates: {update.factor for update in updates} == {0.0, 1.0},
    "bounded(2, late=scale(0.5), pull_every=2)": lambda updates: max(map(staleness_of, updates)) == 2,
}


def staleness_of(update):
    return update.version - min(update.versions)


@pytest.mark.parametrize("rule", RULES)
def test_recorded_updates_that_are_made_again_give_the_same_values_bit_for_bit(rule):
    values, result = train(rule, seed=1)
    late = parse_staleness(rule).late
    assert RULES[rule](result.updates)
    assert sorted(update.ticket for update in result.updates) == [*range(TICKETS)]
    assert all(update.factor == late.factor(staleness_of(update)) for update in result.updates)
    assert (result.rejections > 0) == (late.kind == "reject")
    [counted] = result.metrics
    assert counted == sum(update.factor > 0 for update in result.updates)
    assert [indices.tolist() for indices in result.example_indices] == [[ticket] for ticket in range(TICKETS)]
    found, repeated = train("replay(runs/one)", seed=100, updates=result.updates)
    assert found == values
    assert [update[:5] for update in repeated.updates] == [update[:5] for update in result.updates]


def test_bytes_pulled_fall_with_the_steps_per_pull(monkeypatch):
    encode, sizes = calls.encode, []
    monkeypatch.setattr(calls, "encode", lambda *m: sizes.append(sum(map(len, data := encode(*m)))) or data)

    def pulled_bytes(staleness):
        sizes.clear()
        train(staleness, seed=3)
        answers = [size for size in sizes if size > SIZE * 8]
        return sum(answers) - 2 * TICKETS * SIZE * 8  # without pushes

    every, fourth = pulled_bytes("async"), pulled_bytes("async(pull_every=4)")
    assert 0.2 < fourth / every < 0.6


def opened(late, tickets=3, pull_every=1):
    coordinator = Coordinator(2, Staleness("async", late=late, pull_every=pull_every))
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda worker: coordinator.open(worker, 0, tickets), range(2)))
    return coordinator


def test_the_ticket_of_a_rejected_gradient_goes_to_the_next_worker_and_the_newest_weights_are_read():
    coordinator = opened(LateGradients("reject", after=0), pull_every=3)
    assert [coordinator.take(worker)[:2] for worker in range(2)] == [(0, 0), (1, 0)]
    arrays = [np.array([0]), np.array(1)]
    assert coordinator.commit(0, 0, 1.0, True, [0], arrays=arrays) == Outcome.APPLIED
    # Not finite, but too old to end the training.
    assert coordinator.commit(1, 1, np.nan, False, [0], arrays=arrays) == Outcome.REJECTED
    assert coordinator.take(0) == (1, 1, [1], ())  # its weights are too old to be used again
    assert coordinator.take(1) == (2, 1, [1, 2], ())
    assert coordinator.commit(1, 2, 1.0, True, [1], arrays=arrays) == Outcome.APPLIED
    assert coordinator.commit(0, 1, 1.0, True, [1], arrays=arrays) == Outcome.REJECTED
    assert coordinator.take(1)[:2] == (1, 2)  # the last ticket; nothing can make it late
    assert coordinator.commit(1, 1, 1.0, True, [2], arrays=arrays) == Outcome.APPLIED
    assert coordinator.take(0) is None and coordinator.result().rejections == 2


def test_a_slow_worker_is_rejected_at_most_once_for_each_update_and_no_ticket_starves():
    coordinator, counts = opened(LateGradients("reject", after=0), tickets=40), {0: 0, 1: 0}

    def compute(worker):
        while answer := coordinator.take(worker):
            time.sleep((0.0, 0.01)[worker])
            outcome = coordinator.commit(worker, answer[0], 1.0, True, [answer[1]], arrays=[np.array([answer[0]])])
            counts[worker] += outcome == Outcome.REJECTED

    with ThreadPoolExecutor(2) as threads:
        [call.result(timeout=30) for call in [threads.submit(compute, worker) for worker in range(2)]]
    result = coordinator.result()
    assert [indices.tolist() for indices in result.example_indices] == [[ticket] for ticket in range(40)]
    assert 0 < counts[1] and sum(counts.values()) == result.rejections <= 40
