"""TensorFlow's AutoGraph converts the functions of users, and leaves those of tfdist as they are written."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl import api

from tfdist import keras_internals
from tfdist.data import ArraySource, EvaluationPipeline, Pipeline, Source, StreamSource, as_examples, augmented

X, Y = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6)


def doubled_if_large(x, y):
    """Python's `if` on a tensor, which only a converted function may have."""
    if tf.reduce_max(x) > 4:
        x = 2 * x
    return x, y


class Own(Source):
    """A user's source."""

    size = 6

    def fetch(self, indices):
        return doubled_if_large(tf.gather(X, indices), tf.gather(Y, indices))


def read(source):
    return [x for (x, _), *_ in EvaluationPipeline(source, 2).dataset([0], 1).as_numpy_iterator()]


EXPECTED = [X[:2], 2 * X[2:4], 2 * X[4:]]


@pytest.mark.parametrize(
    "source",
    [
        ArraySource((X, Y), doubled_if_large),
        ArraySource((X, Y)).map(doubled_if_large),
        ArraySource((X, Y)).map(lambda x, y: (x + 0, y)).map(doubled_if_large),
        ArraySource((X, Y)).map(functools.partial(doubled_if_large)),
        ArraySource((X, Y)).in_order().map(doubled_if_large),
        StreamSource(tf.data.Dataset.from_tensor_slices((X, Y))).map(doubled_if_large),
        as_examples(tf.data.Dataset.from_tensor_slices((X, Y)).batch(3)).map(doubled_if_large),
        Own(),
        Own().in_order(),
        Own().map(lambda x, y: (x, y)),
    ],
)
def test_users_functions_are_converted(source):
    np.testing.assert_equal(read(source), EXPECTED)
    assert source.element_spec[0].shape == [2]


def test_a_function_that_is_not_to_be_converted_is_not():
    source = ArraySource((X, Y)).map(tf.autograph.experimental.do_not_convert(doubled_if_large))
    with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
        read(source)


@pytest.fixture
def converted(monkeypatch):
    """The names of the functions that AutoGraph converts. Guards the private function of TensorFlow that does so."""
    names, convert = [], api._convert_actual

    def recorded(entity, context):
        names.append(entity.__name__)
        return convert(entity, context)

    monkeypatch.setattr(api, "_convert_actual", recorded)
    return names


def test_nothing_of_tfdist_is_converted(converted):
    images = ArraySource((np.zeros([6, 4, 4, 1], np.uint8), Y)).map(scaled := lambda x, y: (x / 255, y))
    Pipeline(augmented(images, "flip"), 2, seed=0).dataset([0, 1], 2)
    Pipeline(StreamSource(tf.data.Dataset.from_tensor_slices((X, Y))).map(scaled), 2, seed=0).dataset([0, 1], 2)
    read(images)
    assert set(converted) <= {scaled.__name__}
    assert scaled.__name__ in converted


def test_eager_calls_are_not_converted(converted):
    assert ArraySource((X, Y)).map(doubled_if_large)._fetch(tf.range(2))[0].shape == [2, 2]
    assert not converted
    assert keras_internals.with_autograph(doubled_if_large) is doubled_if_large
