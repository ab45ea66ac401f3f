"""The blocks of a strategy's variables that a process reads and writes, on replicas and on a mesh."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.distribution.strategy import State

VALUES = np.arange(12, dtype="float32").reshape(4, 3)


def test_what_is_written_is_a_copy(single, mirrored2):
    for strategy in (single, mirrored2):
        with strategy.scope():
            variable = tf.Variable(tf.ones([3]))
        [(offset, values)] = strategy.blocks.written(variable, per_replica=False)
        variable.assign([2.0, 3.0, 4.0])
        assert (offset, values.tolist()) == ((0,), [1.0, 1.0, 1.0])
        assert values.flags.owndata


def test_what_is_not_copied_shares_the_memory_of_the_variable(single, mirrored2):
    for strategy in (single, mirrored2):
        with strategy.scope():
            variable = tf.Variable(tf.ones([3]))
        [(_, first)], [(_, second)] = (strategy.blocks.written(variable, False, copied=False) for _ in range(2))
        assert np.shares_memory(first, second) and first.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["single", "mirrored2", "mesh2x2"])
def test_blocks_are_read_back(name, request):
    strategy = request.getfixturevalue(name)
    for per_replica in (False, True):
        saved = np.stack([VALUES + replica for replica in range(strategy.replicas)]) if per_replica else VALUES

        def read(offset, shape, saved=saved):
            return saved[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]

        [variable] = strategy.allocate([State("own", VALUES.shape, tf.float32, per_replica)])
        strategy.blocks.assign(variable, per_replica, read)
        found = np.full(saved.shape, np.nan, "float32")
        for offset, values in strategy.blocks.written(variable, per_replica):
            found[tuple(slice(o, o + n) for o, n in zip(offset, values.shape, strict=True))] = values
        np.testing.assert_array_equal(found, saved)


@pytest.mark.parametrize(("name", "copies"), [("single", 1), ("mirrored2", 2), ("mesh2x2", 4)])
def test_there_is_a_copy_for_each_device(name, copies, request):
    strategy = request.getfixturevalue(name)
    with strategy.scope():
        dense = keras.layers.Dense(4, name="dense")
        dense.build((None, 8))
    found = strategy.blocks.copies(dense.bias.value)
    assert len({owner for owner, _, _ in found}) == len(found) == copies
    with strategy.blocks.full_variables([dense.kernel]):
        assert np.asarray(dense.kernel.value).shape == (8, 4)


@pytest.mark.parametrize(("name", "spans"), [("single", False), ("mirrored2", False), ("mesh2x2", True)])
def test_only_a_mesh_spreads_a_variable_over_processes(name, spans, request):
    assert request.getfixturevalue(name).blocks.spans_processes == spans
