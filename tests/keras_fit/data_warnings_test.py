"""Keras's own `fit` with arrays: labels that cannot be right are refused, and what is suspicious is said once."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.errors import InputError

X = np.random.default_rng(0).standard_normal((20, 4)).astype("float32")
Y = np.arange(20) % 3


def fit(strategy, x, y=None, from_logits=True):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits))
    model = tfdist.distribute(model)
    for _ in range(2):
        model.fit(x, y, verbose=0, shuffle=y is not None)


def test_labels_out_of_range_are_refused(mirrored2):
    with pytest.raises(InputError, match=r"^Labels must be in 0..2, .* y with 3 \(6 of 20"):
        fit(mirrored2, X, Y + 1)


def test_what_is_suspicious_is_said_once(mirrored2, warned_once):
    fit(mirrored2, X, Y, from_logits=False)
    [text] = warned_once()
    assert "from_logits=False" in text


def test_other_data_is_not_read_ahead(mirrored2):
    read = []

    def batches():
        for first in (0, 10):
            read.append(first)
            yield X[first : first + 10], Y[first : first + 10]

    signature = (tf.TensorSpec([10, 4]), tf.TensorSpec([10], tf.int64))
    data = tf.data.Dataset.from_generator(batches, output_signature=signature)
    fit(mirrored2, data.apply(tf.data.experimental.assert_cardinality(2)))
    assert read == [0, 10, 0, 10]
