"""Private API of TensorFlow that says which variables the operations of a graph assign."""

import keras
import tensorflow as tf

from tfdist import keras_internals


def test_assignments_are_found_at_any_depth_and_reads_are_none():
    """Also in loops, conditions, functions and programs of XLA; a lookup in a table and a gradient only read."""
    names = ("before", "plain", "in_loop", "in_condition", "in_function", "in_program", "read", "looked_up")
    variables = {name: keras.Variable(tf.ones([4, 2]), name=name) for name in names}
    found = []

    def double(name):
        variables[name].assign(2.0 * variables[name])
        return tf.constant(0)

    @tf.function(autograph=False)
    def step(condition):
        variables["before"].assign(tf.zeros([4, 2]))
        begun = keras_internals.count_operations()
        double("plain")
        tf.while_loop(lambda i: i < 2, lambda i: i + 1 + double("in_loop"), [tf.constant(0)])
        tf.cond(condition, lambda: double("in_condition"), lambda: tf.constant(0))
        tf.function(lambda: double("in_function"), autograph=False)()
        tf.function(lambda: double("in_program"), autograph=False, jit_compile=True)()
        with tf.GradientTape() as tape:
            function = tf.function(lambda: tf.reduce_sum(variables["read"] * variables["read"]), autograph=False)
            value = function() + tf.reduce_sum(tf.gather(variables["looked_up"].value, [0, 1]))
        tape.gradient(value, [variables["read"].value, variables["looked_up"].value])
        found.extend(keras_internals.assigned_since(begun, list(variables.values())))

    step(tf.constant(True))
    assert dict(zip(names, found, strict=True)) == {name: name == "plain" or name.startswith("in_") for name in names}


def test_eagerly_any_variable_may_have_been_assigned():
    assert keras_internals.assigned_since(keras_internals.count_operations(), [keras.Variable(1.0)]) == [True]


def test_assignments_from_tensors_are_found_also_by_way_of_variables():
    """Also in conditions; what is assigned from other variables, or before, is none."""
    names = ("from_a_tensor", "from_a_variable", "in_condition", "from_another", "before")
    variables = {name: keras.Variable(tf.ones([2]), name=name) for name in names}
    found = []

    def assign(rows):
        variables["in_condition"].assign(rows)
        return tf.constant(0)

    @tf.function(autograph=False)
    def step(rows):
        variables["before"].assign(rows)
        begun = keras_internals.count_operations()
        variables["from_another"].assign(2.0 * variables["from_another"])
        variables["from_a_tensor"].assign_add(rows)
        variables["from_a_variable"].assign_sub(0.1 * variables["from_a_tensor"])
        tf.cond(tf.reduce_sum(rows) > 0, lambda: assign(rows), lambda: tf.constant(0))
        found.extend(keras_internals.assigned_from([rows], begun, list(variables.values())))

    step(tf.ones([2]))
    assert found == [True, True, True, False, False]
