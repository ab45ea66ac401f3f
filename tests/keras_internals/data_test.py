"""Private API of TensorFlow and Keras that says how data was made: of batches or single examples, and of how many rows."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist import keras_internals

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
def test_how_a_data_set_was_made(dataset, is_batched, rows):
    assert keras_internals.is_batched(dataset) == is_batched
    if is_batched:
        assert keras_internals.count_rows(dataset, len(next(iter(dataset))[0])) == rows


def test_a_generator_is_read_from_its_first_batch():
    found = keras_internals.adapted((X + number, Y) for number in range(4))
    assert not found.can_be_read_again and found.length is None
    assert found.first[0][0, 0] == 0
    assert [int(x[0, 0]) for x, _ in found.batches] == [0, 1, 2, 3]
