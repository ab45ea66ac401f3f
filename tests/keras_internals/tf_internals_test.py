"""Private API of TensorFlow and Keras: assignments of a graph, how data was made, and weights that are saved one at a time."""

import contextlib
import pathlib
import tracemalloc

import keras
import numpy as np
import pytest
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
        found.extend(keras_internals.find_assigned(begun, list(variables.values())))

    step(tf.constant(True))
    assert dict(zip(names, found, strict=True)) == {name: name == "plain" or name.startswith("in_") for name in names}


def test_eagerly_any_variable_may_have_been_assigned():
    assert keras_internals.find_assigned(keras_internals.count_operations(), [keras.Variable(1.0)]) == [True]


X, Y = np.zeros((10, 4)), np.zeros((10, 2))
ROWS = tf.data.Dataset.from_tensor_slices((X, Y))
UNKNOWN = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 2]))


def same(x, y):
    return x, y


@pytest.mark.parametrize(
    ("dataset", "is_batched", "rows"),
    [
        (ROWS, False, None),
        (ROWS.map(same), False, None),
        (ROWS.shuffle(10).prefetch(1), False, None),
        (ROWS.batch(3).unbatch(), False, None),
        (tf.data.Dataset.from_tensor_slices((X, Y[:, 0])), False, None),
        (ROWS.batch(3), True, 10),
        (ROWS.batch(3, drop_remainder=True), True, 9),
        (ROWS.batch(3, num_parallel_calls=2).map(same, num_parallel_calls=2).prefetch(1), True, 10),
        (ROWS.batch(3, drop_remainder=True).map(lambda x, y: (tf.ensure_shape(x, [None, 4]), y)), True, 9),
        (ROWS.shuffle(10).batch(5).cache(), True, 10),
        (ROWS.batch(3).with_options(tf.data.Options()), True, 10),
        (ROWS.batch(3).map(lambda x, y: (x[:2], y[:2])), True, None),  # the function has changed the number of rows
        (ROWS.batch(3).shuffle(4), True, None),  # the short batch may be anywhere
        (ROWS.batch(3).repeat(), True, None),
        (ROWS.batch(3).take(2), True, None),
        (ROWS.repeat(2).batch(3), True, 20),
        (ROWS.padded_batch(3), True, None),
        (ROWS.batch(3).rebatch(2), True, None),
        (ROWS.filter(lambda *_: True).batch(3), True, None),
        (tf.data.Dataset.zip(ROWS.batch(3).map(lambda x, y: x), ROWS.batch(3).map(lambda x, y: y)), True, None),
        (tf.data.Dataset.from_generator(lambda: iter([(X, Y)]), output_signature=UNKNOWN), True, None),
    ],
)
def test_how_a_dataset_was_made(dataset, is_batched, rows):
    assert keras_internals.is_batched(dataset) == is_batched
    if is_batched:
        assert keras_internals.count_rows(dataset, len(next(iter(dataset))[0])) == rows


def test_a_generator_is_read_from_its_first_batch():
    found = keras_internals.adapt_data((X + number, Y) for number in range(4))
    assert not found.is_reiterable and found.length is None
    assert found.first[0][0, 0] == 0
    assert [int(x[0, 0]) for x, _ in found.batches] == [0, 1, 2, 3]


LAYERS, WIDTH = 8, 512
BYTES = LAYERS * WIDTH * WIDTH * 4


def peak_of_saving(context: contextlib.AbstractContextManager, model: keras.Model, path: pathlib.Path) -> int:
    tracemalloc.start()
    try:
        with context:
            model.save(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_weights_are_not_held_in_memory(tmp_path: pathlib.Path) -> None:
    model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH) for _ in range(LAYERS))])
    model.save(tmp_path / "first.keras")  # what is imported only now does not count
    plain = peak_of_saving(contextlib.nullcontext(), model, tmp_path / "plain.keras")
    ours = peak_of_saving(keras_internals.weights_in_file(), model, tmp_path / "ours.keras")
    assert plain > BYTES, "Keras needs no replacement any more"
    assert ours < BYTES / 2
    one, other = (keras.saving.load_model(tmp_path / f"{name}.keras") for name in ("plain", "ours"))
    assert all(map(np.array_equal, one.get_weights(), other.get_weights()))
