"""Addresses by which processes on several hosts find each other; `conformance` has real processes on one host."""

import socket

import pytest

pytest.importorskip("horovod")

from tfdist.cluster.environment import Cluster
from tfdist.coordination.addresses import Route
from tfdist.distribution import horovod_rendezvous
from tfdist.errors import InputError


class Others:
    """The group of one rank, with given values of the others."""

    def __init__(self, ways):
        self.ways = ways

    def gather(self, name, value):
        assert name == "horovod/ways" and value in self.ways
        return self.ways

    def broadcast(self, name, value):
        return 7 if value is None else value


def described(monkeypatch, rank, ways, local_rank, local_size):
    monkeypatch.setattr(horovod_rendezvous, "route_to", lambda host, port, family: Route(*ways[rank]))
    monkeypatch.setattr(horovod_rendezvous, "network_interface", lambda address: f"with {address}")
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    cluster = Cluster(rank, len(ways), local_rank, local_size, coordinator="node0:1")
    return horovod_rendezvous.serve_and_describe(cluster, Others(ways))


@pytest.mark.parametrize(
    "here",
    [["127.0.0.1", "127.0.1.1"], ["10.0.0.1", "10.0.0.1"]],
    ids=["its name is its loopback", "its name is its address"],
)
def test_hosts_are_told_apart_by_addresses_which_others_can_reach(monkeypatch, here):
    ways = [here, here, ["10.0.0.2", "10.0.0.1"]]
    second = described(monkeypatch, 1, ways, 1, 2)
    third = described(monkeypatch, 2, ways, 0, 1)
    for one in (second, third):
        assert one["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1"
    assert (second["HOROVOD_HOSTNAME"], second["HOROVOD_GLOO_IFACE"]) == ("10.0.0.1", "with 10.0.0.1")
    assert (third["HOROVOD_HOSTNAME"], third["HOROVOD_GLOO_IFACE"]) == ("10.0.0.2", "with 10.0.0.2")
    assert (third["HOROVOD_LOCAL_RANK"], third["HOROVOD_CROSS_RANK"]) == ("0", "1")


def test_one_host_stays_on_the_loopback(monkeypatch):
    ways = [["10.0.0.1", "10.0.0.1"]] * 2
    one = described(monkeypatch, 1, ways, 1, 2)
    assert (one["HOROVOD_GLOO_RENDEZVOUS_ADDR"], one["HOROVOD_HOSTNAME"]) == ("127.0.0.1", "127.0.0.1")


def test_an_interface_that_the_user_names_is_taken(monkeypatch):
    monkeypatch.setattr(horovod_rendezvous, "route_to", lambda host, port, family: Route("10.0.0.2", "10.0.0.1"))
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "ib0")
    ways = [["10.0.0.1", "10.0.0.1"], ["10.0.0.2", "10.0.0.1"]]
    one = horovod_rendezvous.serve_and_describe(Cluster(1, 2, 0, 1, coordinator="node0:1"), Others(ways))
    assert one["HOROVOD_GLOO_IFACE"] == "ib0"


def test_a_second_start_under_a_launcher_knows_where_rank_0_is(monkeypatch):
    """No coordinator is given then: the address is in Horovod's variables."""
    asked = []
    monkeypatch.setattr(
        horovod_rendezvous, "route_to", lambda *given: asked.append(given) or Route("10.0.0.2", "10.0.0.1")
    )
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "10.0.0.1")
    ways = [["10.0.0.1", "10.0.0.1"], ["10.0.0.2", "10.0.0.1"]]
    one = horovod_rendezvous.serve_and_describe(Cluster(1, 2, 0, 1), Others(ways))
    assert asked == [("10.0.0.1", 1, socket.AF_INET)]
    assert one["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "10.0.0.1"


def test_a_host_without_an_ipv4_address_is_refused(monkeypatch):
    with pytest.raises(InputError, match=r"needs an IPv4 address of rank 0's host. Received: \[::1\]:7 \("):
        horovod_rendezvous.serve_and_describe(Cluster(1, 2, 0, 1, coordinator="[::1]:7"), Others([]))
