"""Rows of replicas: how many each gets, and which positions of the stream they are."""

import threading

import hypothesis
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tfdist.data.row_partition import (
    EVEN,
    ChangingAllocation,
    RowAllocation,
    RowPartition,
    apportion,
    check_batch_size,
    row_range,
)
from tfdist.errors import InputError


@st.composite
def allocations(draw, endless):
    """Draws the partition of each process; the replicas are divided among the processes."""
    batch_size, steps = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    local = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    size = sum(local)
    processes = [tuple(range(sum(local[:i]), sum(local[: i + 1]))) for i in range(len(local))]
    first = draw(st.integers(0, 10**13))
    allocation = EVEN
    if endless and batch_size >= size:
        drawn = [apportion(batch_size, draw(st.lists(st.integers(1, 9), min_size=size, max_size=size))) for _ in "ab"]
        changing = ChangingAllocation(3, [(0, drawn[0]), (4, drawn[1])])
        allocation = draw(st.sampled_from([EVEN, RowAllocation(drawn[0]), changing]))
    total = None if endless else first + draw(st.integers((steps - 1) * batch_size + 1, steps * batch_size))
    return [RowPartition(batch_size, replicas, size, first, total, allocation) for replicas in processes], steps


def covered(partition, steps):
    """Returns the positions that each element has, at least one, and how many of them count, for a number of steps."""
    elements = tf.range(steps * len(partition.replicas), dtype=tf.int64)
    return [(partition.positions(each).numpy().tolist(), int(partition.counts(each)[0])) for each in elements]


@pytest.mark.parametrize("endless", [True, False])
@hypothesis.given(data=st.data())
@hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
def test_the_elements_of_all_processes_cover_each_position_once(endless, data):
    of_processes, steps = data.draw(allocations(endless))
    found = [(partition, covered(partition, steps)) for partition in of_processes]
    batch_size, start, total = of_processes[0].batch_size, of_processes[0].first, of_processes[0].total
    end = total or start + steps * batch_size
    for step in range(steps):
        of_step = [
            position
            for partition, elements in found
            for positions, count in elements[step * len(partition.replicas) : (step + 1) * len(partition.replicas)]
            for position in positions[:count]
        ]
        low = start + step * batch_size
        assert of_step == list(range(low, min(low + batch_size, end)))
    for partition, elements in found:
        assert partition.elements in (len(elements), tf.data.INFINITE_CARDINALITY)
        assert partition.static_count in (None, *(len(positions) for positions, _ in elements))
        assert all(len(positions) == max(count, 1) for positions, count in elements)


def test_counts_are_static_where_they_can_be():
    assert RowPartition(8, (0, 1), 2).static_count == 4
    assert RowPartition(7, (0, 1), 3).static_count is None
    assert RowPartition(7, (1, 2), 3).static_count == 2
    assert RowPartition(8, (0, 1), 2, total=16).static_count == 4
    assert RowPartition(8, (0, 1), 2, total=15).static_count is None
    assert RowPartition(8, (1, 2), 3, allocation=RowAllocation((4, 2, 2))).static_count == 2
    assert RowPartition(8, (0, 1), 3, allocation=RowAllocation((4, 2, 2))).static_count is None
    assert RowPartition(8, (0,), 2, allocation=ChangingAllocation(0, [(0, (4, 4))])).static_count is None


@pytest.mark.parametrize(
    ("batch_size", "replicas", "micro_steps", "words"),
    [
        (13, 4, 1, "--batch_size=13 and 4 replicas. Use 12 or 16.$"),
        (3, 4, 1, "--batch_size=3 and 4 replicas. Use 4.$"),
        (14, 2, 3, "--batch_size=14 and 2 replicas of 3 micro-steps each. Use 12 or 18.$"),
    ],
)
def test_unequal_shares_are_an_error_that_names_a_remedy(batch_size, replicas, micro_steps, words):
    check_batch_size(12, replicas, micro_steps, equal=True)
    with pytest.raises(InputError, match=words):
        check_batch_size(batch_size, replicas, micro_steps, equal=True)


@hypothesis.given(batch_size=st.integers(0, 200), replicas=st.integers(1, 30))
@hypothesis.settings(derandomize=True)
def test_shares_are_disjoint_complete_in_order_and_even(batch_size, replicas):
    shares = [row_range(batch_size, replica, replicas) for replica in range(replicas)]
    assert [row for first, count in shares for row in range(first, first + count)] == list(range(batch_size))
    counts = [count for _, count in shares]
    assert counts == [batch_size // replicas + (replica < batch_size % replicas) for replica in range(replicas)]


@hypothesis.given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.integers(0, 300))
@hypothesis.settings(derandomize=True)
def test_rows_are_in_proportion_to_weights_and_every_replica_has_one(weights, more):
    batch_size = len(weights) + more
    counts = apportion(batch_size, weights)
    assert sum(counts) == batch_size
    assert min(counts) >= 1
    if min(counts) > 1:
        assert all(abs(n - batch_size * w / sum(weights)) <= 1 for n, w in zip(counts, weights, strict=True))


def test_equal_weights_are_the_even_allocation():
    assert apportion(13, (2.0, 2.0, 2.0)) == (5, 4, 4)
    assert apportion(64, (1e6, 1.0)) == (63, 1)


def allocated(allocation, batch):
    tensors = [tf.constant(number, tf.int64) for number in (batch, 12, 1)]
    first, count = allocation.row_range(*tensors, 2)
    return int(first), int(count)


def test_a_change_takes_effect_at_its_step():
    allocation = ChangingAllocation(5, [(0, (6, 6)), (7, (8, 4))])
    assert [allocated(allocation, batch) for batch in range(3)] == [(6, 6), (6, 6), (8, 4)]
    with allocation.pause() as free:
        assert free == 8
        allocation.change(9, (10, 2))
    assert [allocated(allocation, batch) for batch in (3, 4)] == [(8, 4), (10, 2)]


def test_what_was_allocated_is_not_changed():
    allocation = ChangingAllocation(5, [(0, (6, 6))])
    assert allocated(allocation, 2) == (6, 6)
    with allocation.pause() as free, pytest.raises(AssertionError):
        allocation.change(free - 1, (8, 4))


def test_while_a_change_is_decided_nothing_is_allocated():
    allocation = ChangingAllocation(0, [(0, (6, 6))])
    found = []
    thread = threading.Thread(target=lambda: found.append(allocated(allocation, 3)))
    with allocation.pause() as free:
        thread.start()
        thread.join(0.2)
        assert not found
        allocation.change(free, (8, 4))
    thread.join(10)
    assert found == [(8, 4)]
