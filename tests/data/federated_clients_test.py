"""How examples are divided among clients, and clients among replicas."""

import numpy as np
import pytest

from tfdist.config.sync import FedAvg
from tfdist.data.client_examples import Clients

LABELS = np.random.default_rng(3).permutation(np.repeat(np.arange(10), 100))


def clients(size=1000, seed=0, labels=None, **parameters):
    return Clients(FedAvg(**parameters), size, seed, labels=labels)


@pytest.mark.parametrize("sizes", ["equal", "power_law"])
@pytest.mark.parametrize("classes", [0, 2])
def test_every_example_has_one_client(sizes, classes):
    labels = LABELS if classes else None
    found = clients(clients=30, shards_per_client=classes, client_sizes=sizes, labels=labels).examples
    assert len(found) == 30 and min(map(len, found)) >= max(1, classes)
    np.testing.assert_array_equal(np.sort(np.concatenate(found)), np.arange(1000))


def test_equal_sizes_differ_by_at_most_one():
    assert {len(own) for own in clients(clients=30).examples} == {33, 34}


def test_sizes_of_a_power_law():
    sizes = [len(own) for own in clients(size=60000, clients=100, client_sizes="power_law").examples]
    assert sizes[0] == pytest.approx(10 * sizes[9], rel=0.02)


def test_two_shards_of_sorted_classes():
    found = [set(LABELS[own]) for own in clients(clients=10, shards_per_client=2, labels=LABELS).examples]
    assert all(len(classes) <= 2 for classes in found)  # 20 shards of 50, none across two classes of 100
    assert len({tuple(sorted(classes)) for classes in found}) > 5
    assert {len(set(LABELS[own])) for own in clients(clients=10).examples} == {10}


def test_everything_is_a_function_of_the_seed():
    one, same, other = clients(), clients(), clients(seed=1)
    assert one.sample_clients(3) == same.sample_clients(3) != other.sample_clients(3)
    assert one.sample_clients(3) != one.sample_clients(4)
    assert all((a == b).all() for a, b in zip(one.examples, same.examples, strict=True))
    batches = [[b.tolist() for b in of.batches(3, 5, 4)] for of in (one, same, other)]
    assert batches[0] == batches[1] != batches[2]
    assert batches[0] != [b.tolist() for b in one.batches(4, 5, 4)]


def test_these_numbers_never_change():
    assert clients(clients=20, fraction=0.25).sample_clients(0) == [8, 9, 13, 4, 16]
    assert clients(size=10, clients=2).examples[0].tolist() == [1, 4, 5, 7, 9]


def test_batches_are_passes_over_the_data_of_a_client():
    found = clients(size=25, clients=1, local_epochs=2).batches(0, 0, 10)
    assert [len(b) for b in found] == [10, 10, 5, 10, 10, 5]
    for epoch in (found[:3], found[3:]):
        assert sorted(np.concatenate(epoch)) == list(range(25))
    assert found[0].tolist() != found[3].tolist()
    kept = Clients(FedAvg(clients=1), 25, 0, shuffle=False).batches(0, 0, 10)
    assert np.concatenate(kept).tolist() == list(range(25))


@pytest.mark.parametrize("replicas", [1, 2, 3, 20])
def test_clients_are_allocated_by_examples(replicas):
    of = clients(clients=40, fraction=0.3, client_sizes="power_law")
    allocated = of.allocate(7, replicas)
    assert sorted(sum(allocated, [])) == sorted(of.sample_clients(7))
    loads = [sum(len(of.examples[client]) for client in lane) for lane in allocated]
    assert max(loads) - min(loads) <= max(len(of.examples[client]) for client in of.sample_clients(7))
