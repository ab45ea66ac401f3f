"""Every operation of the contract, compared with NumPy on one, two and four replicas."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives import Collectives, OneReplica

COMBINE: dict[str, Any] = {"sum": np.sum, "mean": np.mean, "max": np.max}
RANDOM = np.random.default_rng(0)
FLOATS = RANDOM.integers(-50, 50, (4, 8, 3)).astype("float32")  # sums of these are exact in any order
OTHERS = RANDOM.integers(-50, 50, (4, 5)).astype("float64")


def mine(collectives, values):
    return tf.gather(tf.constant(values), collectives.rank)


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_all_reduce(strategy, run, op):
    n = strategy.replicas
    results = run(strategy, lambda c: c.all_reduce([mine(c, FLOATS), mine(c, OTHERS)], op, name="reduce"))
    assert len(results) == n
    for floats, others in results:
        np.testing.assert_array_equal(floats, COMBINE[op](FLOATS[:n], axis=0))
        np.testing.assert_array_equal(others, COMBINE[op](OTHERS[:n], axis=0))
        assert (floats.dtype, others.dtype) == (np.float32, np.float64)


def test_all_reduce_of_scalars(strategy, run):
    n = strategy.replicas
    for total, highest in run(
        strategy,
        lambda c: (
            c.all_reduce([mine(c, OTHERS[:, 0])], name="sum")[0],
            c.all_reduce([mine(c, OTHERS[:, 1])], "max", name="max")[0],
        ),
    ):
        assert total.shape == highest.shape == ()
        assert (total, highest) == (OTHERS[:n, 0].sum(), OTHERS[:n, 1].max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64"])
def test_supported_dtypes_are_summed(strategy, run, dtype):
    assert tf.as_dtype(dtype) in strategy.collectives.dtypes.reducible
    for [total] in run(strategy, lambda c: c.all_reduce([tf.cast(mine(c, [1, 2, 3, 4]), dtype)], name="reduce")):
        assert total == sum(range(1, strategy.replicas + 1))
        assert tf.as_dtype(total.dtype) == tf.as_dtype(dtype)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64"])
def test_supported_dtypes_are_gathered(strategy, run, dtype):
    dtypes = strategy.collectives.dtypes
    assert {tf.as_dtype(dtype), dtypes.packed} <= dtypes.gatherable
    for [whole] in run(strategy, lambda c: c.all_gather([tf.cast(mine(c, OTHERS), dtype)], name="gather")):
        np.testing.assert_array_equal(whole, OTHERS[: strategy.replicas].reshape(-1).astype(dtype))


def test_all_gather_with_uneven_first_dims(strategy, run):
    """Replica r has r rows of the first tensor, so replica 0 has none."""
    n = strategy.replicas
    results = run(strategy, lambda c: c.all_gather([mine(c, FLOATS)[: c.rank], mine(c, OTHERS)], name="gather"))
    for uneven, even in results:
        np.testing.assert_array_equal(uneven, np.concatenate([FLOATS[r, :r] for r in range(n)]))
        np.testing.assert_array_equal(even, OTHERS[:n].reshape(-1))


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_reduce_scatter(strategy, run, op):
    n = strategy.replicas
    whole = COMBINE[op](FLOATS[:n], axis=0)
    results = run(strategy, lambda c: c.reduce_scatter([mine(c, FLOATS)], op, name="scatter"))
    for rank, [share] in enumerate(results):
        np.testing.assert_array_equal(share, whole[rank * 8 // n : (rank + 1) * 8 // n])


def test_all_to_all(strategy, run):
    n = strategy.replicas
    part = 8 // n
    results = run(strategy, lambda c: c.all_to_all([mine(c, FLOATS)], name="exchange"))
    for rank, [received] in enumerate(results):
        sent = [FLOATS[sender, rank * part : (rank + 1) * part] for sender in range(n)]
        np.testing.assert_array_equal(received, np.concatenate(sent))


@pytest.mark.parametrize("root", [0, 1])
def test_broadcast(strategy, run, root):
    root %= strategy.replicas
    results = run(strategy, lambda c: c.broadcast([mine(c, FLOATS), mine(c, OTHERS[:, 0])], root, name="broadcast"))
    for tensor, scalar in results:
        np.testing.assert_array_equal(tensor, FLOATS[root])
        assert scalar == OTHERS[root, 0]


def test_barrier(strategy, run):
    assert len(run(strategy, lambda c: c.barrier(name="barrier"))) == strategy.replicas


def test_ranks_are_in_order(strategy, run):
    results = run(strategy, lambda c: tf.identity(c.rank))
    assert [int(rank) for rank in results] == list(range(strategy.replicas))
    assert strategy.collectives.size == strategy.replicas


def test_replicas_and_repeats_are_bitwise_equal(strategy, run):
    """With numbers whose sum depends on the order of summation."""
    values = np.random.default_rng(1).standard_normal((4, 1000)).astype("float32")
    runs = [run(strategy, lambda c: c.all_reduce([mine(c, values)], name="reduce")[0]) for _ in range(3)]
    assert len({total.tobytes() for results in runs for total in results}) == 1


def test_two_operations_are_enough_for_an_engine_of_a_third_party():
    assert Collectives.__abstractmethods__ == {"rank", "all_reduce", "all_gather"}
    [share] = OneReplica().reduce_scatter([tf.range(4)], name="scatter")
    np.testing.assert_array_equal(share, [0, 1, 2, 3])
