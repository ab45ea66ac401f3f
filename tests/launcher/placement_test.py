"""Where the ranks of a job are: their numbers, addresses and ports, and the variables that tell an engine so."""

import dataclasses
import json
import socket
import sys

import pytest

from tfdist.cluster.environment import from_horovod, from_tf_config
from tfdist.coordination import LocalGroup
from tfdist.coordination.job_token import Route
from tfdist.errors import InputError
from tfdist.launcher import placement as placing
from tfdist.launcher import placement as ports
from tfdist.launcher.engine_environment import ENGINES
from tfdist.launcher.placement import Placement, place_processes, reachable_address

UNEVEN = Placement(1, ("a", "::1"), ((1, 2, 3), (4,)))


NUMBERS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")


def numbers(node, hosts, ports):
    """Returns the numbers of each rank of a node, as Horovod gets them."""
    placement = Placement(node, hosts, ports)
    variables = [ENGINES["horovod"].variables(placement, 7, rank) for rank in placement.ranks()]
    return [tuple(int(one[f"HOROVOD_{name.upper()}"]) for name in NUMBERS) for one in variables]


def test_ranks_are_numbered_node_by_node(monkeypatch):
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    assert UNEVEN.size == 4
    assert UNEVEN.addresses == ("a:1", "a:2", "a:3", "[::1]:4")
    assert numbers(1, UNEVEN.hosts, UNEVEN.ports) == [(3, 4, 0, 1, 1, 2)]
    assert numbers(0, UNEVEN.hosts, UNEVEN.ports)[2] == (2, 4, 2, 3, 0, 1)


def test_horovod_numbers_them_alike(monkeypatch):
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    hosts = pytest.importorskip("horovod.runner.common.util.hosts")
    counts = (2, 3, 1)
    infos = [hosts.HostInfo(f"node-{node}", count) for node, count in enumerate(counts)]
    ports = tuple(tuple(range(count)) for count in counts)
    slots = hosts.get_host_assignments(infos, 6, 6)
    expected = [tuple(getattr(slot, name) for name in NUMBERS) for slot in slots]
    assert [one for node in range(3) for one in numbers(node, ("a", "b", "c"), ports)] == expected


def test_one_node_stays_on_the_loopback():
    placement = place_processes(3, "127.0.0.1", LocalGroup())
    assert placement.hosts == ("127.0.0.1",) and len(set(placement.ports[0])) == 3
    for port in placement.ports[0]:
        socket.create_server(("127.0.0.1", port)).close()  # the port is free


def test_a_node_s_interface_is_on_its_way_to_another_one(monkeypatch):
    """On node 0, its name often resolves to the loopback."""
    ways = {"10.0.0.2": Route("10.0.0.1", "10.0.0.2"), "node0": Route("10.0.0.2", "10.0.0.1")}
    monkeypatch.setattr(placing, "route_to", ways.get)
    monkeypatch.setattr(placing, "network_interface", lambda address: f"with {address}")
    hosts, ports = ("node0", "10.0.0.2"), ((1,), (2,))
    assert Placement(0, hosts, ports).interface == "with 10.0.0.1"
    assert Placement(1, hosts, ports).interface == "with 10.0.0.2"
    assert Placement(0, ("node0",), ((1,),)).interface == "with 127.0.0.1"


def test_a_node_is_reached_by_the_address_of_its_way_to_the_coordinator():
    assert reachable_address("node0.example:1234", serves=True) == "node0.example"
    assert reachable_address("127.0.0.1:1234", serves=False) == "127.0.0.1"
    assert reachable_address("[::1]:1234", serves=True) == "::1"
    assert reachable_address("", serves=True) == "127.0.0.1"


PLACEMENT = Placement(1, ("127.0.0.1", "127.0.0.1"), ((21001,), (21002, 21003)))


def variables(name, port=7):
    return [ENGINES[name].variables(PLACEMENT, port, rank) for rank in PLACEMENT.ranks()]


def test_tf_config_says_who_a_rank_is():
    first, second = variables("tensorflow")
    assert json.loads(second["TF_CONFIG"])["task"] == {"type": "worker", "index": 2}
    cluster = from_tf_config(first)
    assert cluster and (cluster.rank, cluster.size) == (1, 3)
    assert cluster.addresses == ("127.0.0.1:21001", "127.0.0.1:21002", "127.0.0.1:21003")
    with ENGINES["tensorflow"].serve(PLACEMENT) as port:
        assert port == 0


def test_the_last_ranks_are_parameter_servers():
    placement = dataclasses.replace(PLACEMENT, servers=1)
    found = [from_tf_config(ENGINES["tensorflow"].variables(placement, 7, rank)) for rank in placement.ranks()]
    assert [(cluster.rank, cluster.size, cluster.servers) for cluster in found] == [(1, 3, 1), (2, 3, 1)]


def test_horovods_variables_say_who_a_rank_is():
    first, second = variables("horovod")
    cluster = from_horovod(second)
    assert cluster and (cluster.rank, cluster.size, cluster.local_rank, cluster.local_size) == (2, 3, 1, 2)
    assert (first["HOROVOD_CROSS_RANK"], first["HOROVOD_CROSS_SIZE"]) == ("1", "2")
    assert (second["HOROVOD_CROSS_RANK"], second["HOROVOD_CROSS_SIZE"]) == ("0", "1")
    assert first["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "127.0.0.1" and first["HOROVOD_GLOO_RENDEZVOUS_PORT"] == "7"
    assert first["HOROVOD_GLOO_IFACE"] == "lo" and first["HOROVOD_CONTROLLER"] == "gloo"
    assert first["HOROVOD_HOSTNAME"] == "node-1"


def test_without_horovod_the_command_that_builds_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "horovod.runner.common.util.hosts", None)
    with pytest.raises(InputError, match=r"Run `tfdist install_horovod`"):
        ENGINES["horovod"].serve(PLACEMENT).__enter__()


@pytest.mark.processes
@pytest.mark.waits
def test_a_port_in_use_is_not_offered(monkeypatch):
    taken, free = ports.free_ports(2, "127.0.0.1")
    monkeypatch.setattr(ports, "CANDIDATE_PORTS", [taken, free])
    with socket.create_server(("127.0.0.1", taken)):
        assert ports.free_ports(1, "127.0.0.1") == [free]
        with pytest.raises(InputError, match="Each of 2 processes needs a free port. Received: 1 on"):
            ports.free_ports(2, "127.0.0.1")
