"""Variables are compared before they are created; failure_detection_test.py has real processes."""

import keras
import tensorflow as tf

from tfdist.coordination import LocalGroup
from tfdist.distribution.variable_creation import VariableCreation


class Listening(LocalGroup):
    def __init__(self):
        super().__init__()
        self.heard = []

    def agree(self, name, value, what="", deadline=60.0):
        self.heard.append((name, *value.items()))


def test_each_variable_is_said_before_it_is_made_and_its_first_value_drawn_once():
    group, drawn = Listening(), []

    def value():
        drawn.append(len(group.heard))
        return tf.ones([2, 3])

    with tf.variable_creator_scope(VariableCreation(group).agree):
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

    with tf.variable_creator_scope(VariableCreation(group).agree):
        assert step().numpy().tolist() == [1.0, 1.0]
    assert len(group.heard) == 1
