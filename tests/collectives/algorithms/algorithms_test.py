"""Every algorithm has the sum of all replicas, with the same bits on each, and sends the bytes of its docstring."""

import numpy as np
import pytest
import tensorflow as tf

from tests.collectives import threads
from tfdist.cluster.topology import Topology
from tfdist.collectives import RecordingCollectives
from tfdist.collectives.all_reduce_algorithms import CATALOG, check_algorithm, groups_of, possible_algorithms
from tfdist.errors import InputError

TOPOLOGIES = ("2", "3", "4", "2,2", "5", "6", "2,2,2", "3,3", "7", "8", "4,4")
SIZES = (1, 7, 48)


def topology_of(text):
    return Topology.parse(text, sum(map(int, text.split(","))))


CASES = [(text, name) for text in TOPOLOGIES for name in possible_algorithms(topology_of(text))[1:]]


def summed(text, name, size, **how):
    """Returns each replica's vector, its sum by an algorithm, and its recording."""
    topology = topology_of(text)
    data = np.random.default_rng(size).standard_normal((topology.size, size))

    def replica(collectives):
        recording = RecordingCollectives(collectives)
        return CATALOG[name].sum(recording, tf.constant(data[collectives.rank]), topology, "x").numpy(), recording

    totals, recordings = zip(*threads.run(topology.size, replica, **how), strict=True)
    return data, totals, recordings


@pytest.mark.parametrize(("text", "name"), CASES)
def test_the_sum_is_the_same_on_every_replica_and_in_every_run(text, name):
    for size in SIZES:
        data, totals, _ = summed(text, name, size)
        np.testing.assert_allclose(totals[0], data.sum(0), rtol=1e-12, atol=1e-13)
        assert len({total.tobytes() for total in totals}) == 1
        assert summed(text, name, size)[1][0].tobytes() == totals[0].tobytes()
        assert summed(text, name, size, native_all_to_all=True)[1][0].tobytes() == totals[0].tobytes()


@pytest.mark.parametrize("native_all_to_all", [False, True])
@pytest.mark.parametrize(("text", "name"), CASES)
def test_only_the_declared_groups_communicate(text, name, native_all_to_all):
    topology, everyone = topology_of(text), tuple(range(sum(map(int, text.split(",")))))
    recordings = summed(text, name, 8, native_all_to_all=native_all_to_all)[2]
    used = {tuple(sorted(call.ranks or everyone)) for recording in recordings for call in recording.calls}
    assert {group for group in used if len(group) > 1} == set(groups_of([name], topology))


def sent(text, name, size=48):
    """Returns the bytes that each replica passes in, as a multiple of the vector's."""
    return [recording.payload_bytes / (8 * size) for recording in summed(text, name, size)[2]]


@pytest.mark.parametrize("replicas", [2, 3, 4, 6, 8])
def test_a_ring_sends_the_least_possible(replicas):
    assert sent(str(replicas), "ring") == pytest.approx([2 * (replicas - 1) / replicas] * replicas)


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_recursive_doubling_and_halving_send_what_they_say(replicas):
    assert sent(str(replicas), "tree") == [np.log2(replicas)] * replicas
    assert sent(str(replicas), "halving_doubling") == pytest.approx([2 * (replicas - 1) / replicas] * replicas)


@pytest.mark.parametrize("name", ["tree", "halving_doubling"])
def test_replicas_beyond_a_power_of_two_send_their_vector_to_a_neighbor(name):
    of_two = 1.0
    assert sent("3", name) == [1, of_two + 1, of_two], "rank 1 sums for rank 0, and returns the result"


def between_hosts(text, name, size=48):
    """Returns the bytes that the replicas of the first host send to others, as a multiple of the vector's."""
    topology = topology_of(text)
    recordings = summed(text, name, size)[2]
    calls = [call for rank in topology.ranks_of(0) for call in recordings[rank].calls]
    hosts = [{topology.host_by_rank[rank] for rank in call.ranks or range(topology.size)} for call in calls]
    return sum(call.payload_bytes for call, on in zip(calls, hosts, strict=True) if len(on) > 1) / (8 * size)


def test_hierarchical_sends_two_thirds_of_a_ring_to_the_other_host():
    """A part of n / 2 enters the all-reduce between two hosts, which sends 2 (H - 1) / H = 1 of it, on each replica."""
    assert between_hosts("2,2", "hierarchical") == 1
    assert between_hosts("2,2", "ring") == 1.5
    assert between_hosts("2,2", "halving_doubling") == 1, "the halves are exchanged inside"


@pytest.mark.parametrize("text", ["4", "1,1", "2,1"])
def test_hierarchical_needs_hosts_with_equal_numbers_of_replicas(text):
    assert "hierarchical" not in possible_algorithms(topology_of(text))
    with pytest.raises(
        InputError, match=f"needs several hosts.* Received: hosts with {text} replicas. Pass --topology"
    ):
        check_algorithm("hierarchical", topology_of(text))
