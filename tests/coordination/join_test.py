import contextlib
import os
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.coordination.wire import Between
from tests.waiting import DEADLINE, wait_for
from tfdist.cluster.environment import Cluster
from tfdist.coordination import LocalGroup, join
from tfdist.coordination.job_token import LOOPBACK, split_address
from tfdist.errors import InputError, PeerLostError
from tfdist.launcher.placement import free_ports

pytestmark = [pytest.mark.processes, pytest.mark.waits]

TOKEN = "the job's token"


@pytest.fixture
def coordinator():
    return f"{LOOPBACK}:{free_ports(1, LOOPBACK)[0]}"


def outcomes(calls):
    """Makes calls concurrently; returns what each returns or raises."""

    def outcome(call):
        try:
            return call()
        except (PeerLostError, InputError) as error:
            return error

    with ThreadPoolExecutor(max_workers=8) as pool:
        return [one.result(DEADLINE) for one in [pool.submit(outcome, call) for call in calls]]


def members(size, coordinator, ranks=None, environment=None, start_timeout=DEADLINE, **cluster):
    def one(rank):
        here = Cluster(rank=rank, size=size, coordinator=coordinator, **{"local_size": size} | cluster)
        return join(here, environment=environment or {}, start_timeout=start_timeout)

    return outcomes([lambda rank=rank: one(rank) for rank in (range(size) if ranks is None else ranks)])


def listens(address):
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(split_address(address)):
        return True
    return False


def leave(groups):
    outcomes([lambda group=group: group.leave() for group in groups])


def test_one_process_needs_nobody():
    assert isinstance(join(Cluster(), environment={"TFDIST_GROUP": "nowhere:1"}), LocalGroup)


@pytest.mark.parametrize(
    "host, cluster",
    [(LOOPBACK, {}), ("localhost", {"local_size": 1}), ("some.name.that.nobody.has.invalid", {})],  # all on one host
)
def test_rank_0_serves_and_all_find_each_other(host, cluster, coordinator):
    groups = members(3, coordinator.replace(LOOPBACK, host), **cluster)
    assert [(group.rank, group.size) for group in groups] == [(0, 3), (1, 3), (2, 3)]
    assert outcomes([lambda g=g: g.gather("x", g.rank) for g in groups]) == [[0, 1, 2]] * 3
    leave(groups)


def test_a_launcher_may_serve(job):
    launcher = job(2, members=False)
    environment = {"TFDIST_GROUP": launcher.server.address, "TFDIST_TOKEN": TOKEN}
    groups = members(2, "", environment=environment)
    assert outcomes([lambda g=g: g.gather("x", g.rank) for g in groups]) == [[0, 1]] * 2
    launcher.server.close()
    leave(groups)


def test_whoever_does_not_come_is_named_by_those_who_did(coordinator):
    addresses = ("a:1", "b:2", "c:3", "d:4")
    first, second = members(4, coordinator, ranks=(0, 2), start_timeout=4.0, addresses=addresses)
    expected = "ranks 1, 3 did not reach 'start' within 4 s (never connected: rank 1 at b:2, 3 at d:4)."
    assert str(first) == str(second) == expected and first.exit_code == 5


@pytest.mark.parametrize("ranks", [(0, 0), (0, 1, 1)])
def test_a_rank_that_two_processes_have_is_said_by_all_at_once(coordinator, ranks):
    errors = members(len(ranks), coordinator, ranks=ranks)
    twice = rf"unique rank. Received: rank {ranks[-1]} \(pid {os.getpid()} on .*\), already taken by pid {os.getpid()}"
    assert [bool(re.search(twice, str(error))) for error in errors].count(False) == ranks.count(0) - 1


def test_a_port_in_use_is_bad_input(coordinator):
    port = int(coordinator.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        (error,) = members(2, coordinator, ranks=(0,))
    assert isinstance(error, InputError)
    assert str(error) == (
        f"The group must be served at {coordinator}. Received: port in use. "
        "Set a unique rank for each process. If another program uses the port, set TFDIST_COORDINATOR=host:port to another "
        "one, the same for every process."
    )


def test_a_coordinator_that_is_missing_or_unknown_is_bad_input(monkeypatch):
    def unknown_host(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    (missing,) = members(2, "", ranks=(1,))
    assert isinstance(missing, InputError) and "Set TFDIST_COORDINATOR" in str(missing)
    monkeypatch.setattr(socket, "getaddrinfo", unknown_host)  # a real resolver may be slow
    (unknown,) = members(2, "no.such.host.invalid:1", ranks=(0,), local_size=1)
    assert isinstance(unknown, InputError) and "no.such.host.invalid:1" in str(unknown)


def test_processes_of_another_job_are_refused_by_default(coordinator):
    """Two jobs on one port: their addresses differ, and so do their default tokens."""
    results = []

    def rank_of_the_first_job(rank):
        cluster = Cluster(rank, 2, rank, 2, addresses=("a:1", "a:2"), coordinator=coordinator)
        results.append(join(cluster, environment={}, start_timeout=DEADLINE))

    threads = [threading.Thread(target=rank_of_the_first_job, args=(rank,)) for rank in range(2)]
    threads[0].start()
    (error,) = members(2, coordinator, ranks=(1,), addresses=("a:1", "a:9"))
    assert isinstance(error, InputError) and "another job listens there" in str(error)
    threads[1].start()
    for thread in threads:
        thread.join(DEADLINE)
    leave(results)


def test_a_process_of_another_job_with_the_same_token_is_refused(coordinator):
    """Someone on the way leads rank 1 of one job to rank 0 of another one, and passes on what they say."""
    environment = {"TFDIST_TOKEN": TOKEN}
    with ThreadPoolExecutor(max_workers=1) as pool:
        serving = pool.submit(members, 2, coordinator, (0,), environment, 5.0)
        wait_for(lambda: listens(coordinator))
        between = Between(coordinator)
        try:
            (led,) = members(2, between.address, (1,), environment)
        finally:
            between.close()
        (first,) = serving.result(DEADLINE)
    assert isinstance(led, InputError) and "another job listens there" in str(led)
    assert isinstance(first, PeerLostError) and "never connected: rank 1" in str(first)


def test_what_members_derive_from_the_token_is_of_their_group_alone(coordinator):
    found = []
    for _ in range(2):
        groups = members(2, coordinator, environment={"TFDIST_TOKEN": TOKEN})
        found.append([group.token_for(purpose) for purpose in "xy" for group in groups])
        leave(reversed(groups))
    assert all(ours[0] == ours[1] != ours[2] == ours[3] for ours in found)
    assert not set(found[0]) & set(found[1])
