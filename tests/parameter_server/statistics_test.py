"""Tests of the statistics of parameter servers: updates, bytes, and waiting in the coordinator."""

import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np

from tests.waiting import wait_for
from tfdist.config.staleness import Staleness
from tfdist.coordination.calls import Connection, Message, Service, encode
from tfdist.coordination.job_token import listen
from tfdist.coordination.messages import OVERHEAD
from tfdist.parameter_server.coordinator import Coordinator, RangeResult
from tfdist.parameter_server.servers import Servers
from tfdist.parameter_server.table_rows import TableRows, TableSpec
from tfdist.parameter_server.update_order import Update
from tfdist.synchronization.server_updates import Statistics


def test_the_fields_of_a_record_are_exact_counts_since_the_last_one():
    random, statistics = Random(0), Statistics(3, [5.0, 0.0])
    updates = [
        Update(v, v, (random.randrange(2),), tuple(max(v - random.randrange(4), 0) for _ in range(2)))
        for v in range(40)
    ]
    work = [{"examples": 64, "compute": 1.0, "workers": 0.5, "pull/0": 10, "pull/1": 1, "push/1": 7}, {"pull/0": 5}, {}]
    for first in (0, 20):
        statistics.add(RangeResult([], updates[first : first + 20], True, work=work), 2.0, [5.5 + first, 0.25])
    fields = statistics.take_fields()
    ages = [[update.version - version for version in update.versions] for update in updates]
    for server, histogram in enumerate(fields["staleness_histogram"]):
        of_server = [pair[server] for pair in ages]
        assert histogram == {str(age): of_server.count(age) for age in sorted({*of_server})}
    assert fields["staleness"] == np.mean([max(pair) for pair in ages]) and fields["max_staleness"] == 3
    counts = [sum(update.workers == (rank,) for update in updates) for rank in range(3)]
    assert [worker["updates"] for worker in fields["workers"]] == counts and counts[2] == 0
    assert fields["workers"][0] == {
        "updates": counts[0],
        "updates_per_second": counts[0] / 4,
        "examples_per_second": 32,
        "compute_seconds": 2,
        "wait_seconds": {"data": 0, "workers": 1, "pull": 0, "push": 0},
    }
    assert fields["servers"] == [
        {"pulled_bytes": 30, "pushed_bytes": 0, "update_seconds": 20.5},
        {"pulled_bytes": 2, "pushed_bytes": 14, "update_seconds": 0.25},
    ]
    assert statistics.take_fields() == {}
    statistics.add(RangeResult([], [Update(40, 40, (0, 1, 2))], True), 1.0, [26.0, 0.25])
    fields = statistics.take_fields()
    assert fields.keys() == {"workers", "servers"} and fields["servers"][0]["update_seconds"] == 0.5
    assert [worker["updates"] for worker in fields["workers"]] == [1, 1, 1]


def test_commits_have_the_bytes_of_the_encoded_messages_of_each_server():
    sizes, works = [{}, {}], []

    def service(number):
        def handle(method, answer):
            def handler(message):
                parts = [*encode(message, method), *encode(answer)]
                sizes[number][method] = sum(map(len, parts)) + 2 * (8 + OVERHEAD)  # the length and the MAC of a header
                return answer

            return handler

        pulled = Message({"version": 0, "norm": 0.0, "update_seconds": 1.5}, [np.zeros([100 * (number + 1)])])

        def commit(message):
            works.extend([message.values["work"]] if "work" in message.values else [])
            return Message({"value": True})

        return Service(
            {"pull": handle("pull", pulled), "push": handle("push", Message({})), "commit": commit, "take": commit},
            "",
            listen("127.0.0.1:0", ""),
        )

    services = [service(number) for number in range(2)]
    servers = Servers([Connection(f"127.0.0.1:{s.port}", "", "server") for s in services], worker=0, workers=1)
    servers.place([("kernel", 1600), ("bias", 800)], [])
    for ticket in range(2):
        for size in sizes:
            size.clear()
        servers.pull(0)
        gradients = [np.zeros([200]), np.zeros([100])]
        servers.commit(ticket, [], servers.push_messages(ticket, [0, 0], gradients, [], methods=["none", "none"]))
        found = {f"{method}/{server}": size for server, size_by in enumerate(sizes) for method, size in size_by.items()}
        assert {name: size for name, size in works[ticket].items() if "/" in name} == found
        assert min(found.values()) > 100 and works[ticket]["pull"] > 0 and works[ticket]["push"] > 0
    assert servers.update_seconds == [1.5, 1.5]
    for each in services:
        each.close()


def test_the_server_whose_answer_is_awaited_is_named():
    ends = threading.Event()
    value = Message({}, [np.zeros([])])
    handlers = (lambda _: value), (lambda _: value if ends.wait(20) else None)
    services = [Service({"fetch": handler}, "", listen("127.0.0.1:0", "")) for handler in handlers]
    names = (f"server {number} (rank {number + 2})" for number in range(2))
    connections = [Connection(f"127.0.0.1:{s.port}", "", name) for s, name in zip(services, names, strict=True)]
    servers = Servers(connections, worker=0, workers=1)
    call = threading.Thread(target=servers.fetch, args=[["optimizer/0", "slot/1/0"]])
    servers.place([("kernel", 8), ("bias", 8)], [])
    call.start()
    wait_for(lambda: servers.describe_wait() == "server 1 (rank 3) to answer fetch", 10)
    ends.set()
    call.join()
    assert servers.describe_wait() == ""
    for each in services:
        each.close()


def test_the_worker_that_waits_for_a_slow_one_is_known():
    coordinator = Coordinator(2, Staleness())

    def work(worker):
        for first in (0, 6):
            coordinator.open(worker, first, first + 6)
            while answer := coordinator.take(worker):
                threading.Event().wait(0.02 * worker)
                coordinator.commit(worker, answer[0], 0.0, True, [0], work={"compute": 1.0})
            result = coordinator.result(worker)
            threading.Event().wait(0.1 * (worker == 0))  # saves; the other waits for nobody that computes
        return result.work

    with ThreadPoolExecutor(2) as threads:
        works, _ = threads.map(work, range(2))
    assert [work["compute"] for work in works] == [6, 6]  # of the last range
    assert works[0]["workers"] > 0.1 and works[1]["workers"] < 0.08


def test_the_use_of_rows_is_counted():
    rows = TableRows(TableSpec("a", (300, 2), "float32", None), server=1, servers=2)
    for _ in range(5):
        rows.pull_counts[np.array([3, 140])] += 1
    rows.pull_counts[np.array([7])] += 1
    assert rows.usage() == (3, 11, 5)  # 1% of 150 rows is one
