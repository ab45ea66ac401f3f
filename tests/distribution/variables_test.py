"""Variables: compared before they are created, and the blocks that a process reads and writes, on replicas and on a mesh."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.coordination import LocalGroup
from tfdist.distribution.strategy import State
from tfdist.distribution.tf_distribute import consistent_variable_creator


class Listening(LocalGroup):
    def __init__(self):
        super().__init__()
        self.heard = []

    def agree(self, name, value, prefix="", deadline=60.0):
        self.heard.append((name, *value.items()))


def test_each_variable_is_said_before_it_is_made_and_its_first_value_drawn_once():
    group, drawn = Listening(), []

    def value():
        drawn.append(len(group.heard))
        return tf.ones([2, 3])

    with tf.variable_creator_scope(consistent_variable_creator(group)):
        variable = keras.Variable(lambda shape, dtype: value(), shape=(2, 3), name="kernel")
        tf.Variable(1, name="count")
    assert drawn == [0] and variable.numpy().tolist() == [[1.0] * 3] * 2
    assert group.heard == [
        ("variable/1", ("variable number 1", "kernel float32[2, 3]")),
        ("variable/2", ("variable number 2", "count")),
    ]


def test_in_a_graph_the_value_is_left_to_it():
    group, made = Listening(), []

    @tf.function
    def step():
        if not made:
            made.append(tf.Variable(lambda: tf.zeros([2]), name="lazy"))
        return made[0] + 1.0

    with tf.variable_creator_scope(consistent_variable_creator(group)):
        assert step().numpy().tolist() == [1.0, 1.0]
    assert len(group.heard) == 1


VALUES = np.arange(12, dtype="float32").reshape(4, 3)


def test_what_is_written_is_a_copy(single, mirrored2):
    for strategy in (single, mirrored2):
        with strategy.scope():
            variable = tf.Variable(tf.ones([3]))
        [(offset, values)] = strategy.blocks.saved_blocks(variable, per_replica=False)
        variable.assign([2.0, 3.0, 4.0])
        assert (offset, values.tolist()) == ((0,), [1.0, 1.0, 1.0])
        assert values.flags.owndata


def test_what_is_not_copied_shares_the_memory_of_the_variable(single, mirrored2):
    for strategy in (single, mirrored2):
        with strategy.scope():
            variable = tf.Variable(tf.ones([3]))
        [(_, first)], [(_, second)] = (strategy.blocks.saved_blocks(variable, False, copied=False) for _ in range(2))
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
        for offset, values in strategy.blocks.saved_blocks(variable, per_replica):
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
