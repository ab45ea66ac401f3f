import hypothesis
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tfdist.data.row_allocation import EVEN, ChangingAllocation, FixedAllocation, apportion
from tfdist.data.row_partition import RowPartition, check_equal_shares
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
        allocation = draw(st.sampled_from([EVEN, FixedAllocation(drawn[0]), changing]))
    total = None if endless else first + draw(st.integers((steps - 1) * batch_size + 1, steps * batch_size))
    return [RowPartition(batch_size, replicas, size, first, total, allocation) for replicas in processes], steps


def covered(partition, steps):
    """Returns the positions that each element covers, for a number of steps."""
    elements = tf.range(steps * len(partition.replicas), dtype=tf.int64)
    return [partition.positions(element).numpy().tolist() for element in elements]


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
            for positions in elements[step * len(partition.replicas) : (step + 1) * len(partition.replicas)]
            for position in positions
        ]
        low = start + step * batch_size
        assert of_step == list(range(low, min(low + batch_size, end)))
    for partition, elements in found:
        assert partition.elements in (len(elements), tf.data.INFINITE_CARDINALITY)
        assert partition.static_count in (None, *(len(positions) for positions in elements))


def test_counts_are_static_where_they_can_be():
    assert RowPartition(8, (0, 1), 2).static_count == 4
    assert RowPartition(7, (0, 1), 3).static_count is None
    assert RowPartition(7, (1, 2), 3).static_count == 2
    assert RowPartition(8, (0, 1), 2, total=16).static_count == 4
    assert RowPartition(8, (0, 1), 2, total=15).static_count is None
    assert RowPartition(8, (1, 2), 3, allocation=FixedAllocation((4, 2, 2))).static_count == 2
    assert RowPartition(8, (0, 1), 3, allocation=FixedAllocation((4, 2, 2))).static_count is None
    assert RowPartition(8, (0,), 2, allocation=ChangingAllocation(0, [(0, (4, 4))])).static_count is None


def test_equal_shares_pass():
    check_equal_shares(12, 4)
    check_equal_shares(12, 2, micro_steps=3)


def test_micro_steps_have_equal_shares_too():
    with pytest.raises(InputError, match="batch_size=14 and 2 replicas of 3 micro-steps each. Use 12 or 18."):
        check_equal_shares(14, 2, micro_steps=3)


@pytest.mark.parametrize(("batch_size", "replicas", "use"), [(13, 4, "Use 12 or 16."), (3, 4, "Use 4.")])
def test_unequal_shares_are_an_error_that_names_a_remedy(batch_size, replicas, use):
    with pytest.raises(InputError) as error:
        check_equal_shares(batch_size, replicas)
    assert f"--batch_size={batch_size} and {replicas} replicas" in str(error.value)
    assert str(error.value).endswith(use)
