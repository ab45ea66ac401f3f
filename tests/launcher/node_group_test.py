"""Launchers on several hosts, with real processes."""

import json
import signal
import socket
import time

import pytest

from tests.coordination.join_test import listens
from tests.launcher.launching import free_address, member, python
from tests.waiting import wait_for

pytestmark = [pytest.mark.processes, pytest.mark.waits]


def two_nodes(launch, *command, processes=("1", "1"), flags=()):
    coordinator = free_address()
    return [
        launch(
            *command,
            flags=(f"--processes={n}", "--nodes=2", f"--node_rank={node}", f"--coordinator={coordinator}", *flags),
        )
        for node, n in enumerate(processes)
    ]


def test_several_hosts_make_one_job(launch, tmp_path):
    body = "print(group.gather('pids', os.getpid()) and os.environ['TF_CONFIG'])"
    nodes = two_nodes(launch, *member(body), processes=("2", "1"))
    assert [one.wait() for one in nodes] == [0, 0]
    assert sorted(line[:3] for one in nodes for line in one.out.splitlines()) == ["[0]", "[1]", "[2]"]
    configs = {json.dumps(json.loads(line[4:])["cluster"]) for one in nodes for line in one.out.splitlines()}
    assert len(configs) == 1
    assert len(list(tmp_path.glob("runs/*/rank-?.log"))) == 3


@pytest.mark.parametrize("victim", [0, 1])
def test_a_failure_on_one_host_ends_all_with_its_code(launch, victim):
    body = f"if rank == {victim}: time.sleep(0.5); sys.exit(3)\ntime.sleep(1000)"
    nodes = two_nodes(launch, *python(body))
    assert [one.wait() for one in nodes] == [3, 3]
    assert f"rank {victim} ended with code 3" in nodes[victim].said[-1]
    assert f"node {victim} is lost: ended with code 3 (loss not finite): rank {victim}" in nodes[1 - victim].said[-1]


def test_the_other_hosts_hear_of_a_failure_before_its_last_process_has_ended(launch, tmp_path):
    """Rank 1 does not end when it is asked to, and sees that rank 2, on the other host, has been asked, too."""
    body = """
import signal
signal.signal(signal.SIGTERM, (signal.SIG_DFL, signal.SIG_IGN, lambda *_: (open("asked", "w").close(), sys.exit()))[rank])
open(f"ready-{rank}", "w").close()
while rank == 0 and not (os.path.exists("ready-1") and os.path.exists("ready-2")):
    time.sleep(0.01)
if rank == 0:
    sys.exit(3)
while not os.path.exists("asked"):
    time.sleep(0.01)
open(f"seen-{rank}", "w").close()
time.sleep(1000)
"""
    nodes = two_nodes(launch, *python(body), processes=("2", "1"))
    assert [one.wait() for one in nodes] == [3, 3]
    assert (tmp_path / "seen-1").exists()


@pytest.mark.parametrize("runs", ["True", "rank == 1"])
def test_a_launcher_that_dies_ends_the_other_whether_that_runs_or_is_done(launch, runs):
    nodes = two_nodes(launch, *python(f"if {runs}: time.sleep(rank); print('ready', flush=True); time.sleep(1000)"))
    assert [one.read_line() for one in nodes[runs != "True" :]][-1] == "[1] ready\n"
    nodes[1].process.kill()
    assert nodes[0].wait() == 5
    assert "node 1 is lost: its connection closed without a goodbye" in nodes[0].said[-1]


def test_a_host_that_does_not_come_is_named(launch):
    flags = ("--nodes=3", f"--coordinator={free_address()}", "--start_timeout_seconds=8")
    nodes = [launch("true", flags=(*flags, f"--node_rank={node}")) for node in (0, 2)]
    assert [one.wait() for one in nodes] == [5, 5]
    for one in nodes:
        assert one.said[-1] == "tfdist launch: node 1 did not reach 'start' within 8 s (never connected: node 1)."


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_waiting_for_other_hosts_can_be_interrupted(launch, number, code):
    address = free_address()
    one = launch("true", flags=("--nodes=2", f"--coordinator={address}"))
    wait_for(lambda: listens(address))
    began = time.monotonic()
    one.process.send_signal(number)
    assert one.wait() == code
    assert time.monotonic() - began < 30.0


def test_a_coordinators_port_in_use_is_bad_input(launch):
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        one = launch("true", flags=("--nodes=2", f"--coordinator={address}"))
        assert one.wait() == 2
    assert one.said == [
        f"tfdist launch: The group must be served at {address}. Received: port in use. "
        "Choose another --coordinator, the same on every host."
    ]


def test_launchers_with_one_token_file(launch, tmp_path):
    """Its token is not the ranks': they get one that is derived from it."""
    (tmp_path / "secret").write_text("the secret of the launchers")
    (tmp_path / "secret").chmod(0o600)
    body = "print(os.environ['TFDIST_TOKEN'], os.environ.get('TFDIST_TOKEN_FILE'))"
    nodes = two_nodes(launch, *member(body), flags=("--token_file=secret",))
    assert [one.wait() for one in nodes] == [0, 0]
    (token,) = {one.out.split(maxsplit=1)[1] for one in nodes}
    assert "secret" not in token and len(token.split()[0]) == 64
