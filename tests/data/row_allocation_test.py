import threading

import hypothesis
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tfdist.data.row_allocation import ChangingAllocation, apportion, rows


@hypothesis.given(batch_size=st.integers(0, 200), replicas=st.integers(1, 30))
@hypothesis.settings(derandomize=True)
def test_shares_are_disjoint_complete_in_order_and_even(batch_size, replicas):
    shares = [rows(batch_size, replica, replicas) for replica in range(replicas)]
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
    first, count = allocation.share(*tensors, 2)
    return int(first), int(count)


def test_a_change_takes_effect_at_its_step():
    allocation = ChangingAllocation(5, [(0, (6, 6)), (7, (8, 4))])
    assert [allocated(allocation, batch) for batch in range(3)] == [(6, 6), (6, 6), (8, 4)]
    with allocation.held() as free:
        assert free == 8
        allocation.change(9, (10, 2))
    assert [allocated(allocation, batch) for batch in (3, 4)] == [(8, 4), (10, 2)]


def test_what_was_allocated_is_not_changed():
    allocation = ChangingAllocation(5, [(0, (6, 6))])
    assert allocated(allocation, 2) == (6, 6)
    with allocation.held() as free, pytest.raises(AssertionError):
        allocation.change(free - 1, (8, 4))


def test_while_a_change_is_decided_nothing_is_allocated():
    allocation = ChangingAllocation(0, [(0, (6, 6))])
    found = []
    thread = threading.Thread(target=lambda: found.append(allocated(allocation, 3)))
    with allocation.held() as free:
        thread.start()
        thread.join(0.2)
        assert not found
        allocation.change(free, (8, 4))
    thread.join(10)
    assert found == [(8, 4)]
