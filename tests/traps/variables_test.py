"""Memory of TensorFlow's variables, of which pipelines without a flush hold a version for each step that is on its way."""

import numpy as np
import tensorflow as tf


def address(variable: tf.Variable) -> int:
    return np.asarray(memoryview(variable.read_value())).ctypes.data


def test_a_variable_shares_the_memory_of_the_value_that_it_is_assigned():
    weights, older = tf.Variable(tf.random.normal([100, 100])), tf.Variable(tf.zeros([100, 100]))
    before, place = weights.numpy(), address(weights)

    @tf.function(autograph=False)
    def step() -> None:
        older.assign(weights)
        weights.assign_add(tf.ones_like(weights))

    step()
    assert address(older) == place != address(weights)
    np.testing.assert_array_equal(older, before)
