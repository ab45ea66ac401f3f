"""Which ranks share a host."""

import pytest

from tfdist.cluster.topology import Topology
from tfdist.errors import InputError


def test_consecutive_ranks():
    topology = Topology.parse("2,1", 3)
    assert topology == Topology((0, 0, 1))
    assert (topology.size, topology.hosts, str(topology)) == (3, 2, "2,1")
    assert [topology.ranks_of(host) for host in range(2)] == [(0, 1), (2,)]


def test_names_of_hosts():
    topology = Topology.from_host_names(["b", "a", "b", "a"])
    assert topology.host_by_rank == (0, 1, 0, 1)
    assert topology.ranks_of(1) == (1, 3)


@pytest.mark.parametrize("text", ["2,1", "2,3", "2,,2", "0,4", "two", "", "-1,5", "4.0", "²,2"])
def test_numbers_that_do_not_fit(text):
    with pytest.raises(InputError, match=f"with a sum of 4, .* Received: {text}. For example, pass --topology=2,2."):
        Topology.parse(text, 4)
