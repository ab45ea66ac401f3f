from typing import NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import EvaluationPipeline, Pipeline, StreamSource
from tfdist.errors import InputError


def pairs(size):
    return tf.data.Dataset.range(size).map(lambda i: (i, -i))


def rows(pipeline, steps):
    return [x.tolist() for x, *_ in pipeline.dataset([0], 1).take(steps).as_numpy_iterator()]


class Pair(NamedTuple):
    """An example with names."""

    features: tf.Tensor
    target: tf.Tensor


def test_examples_may_be_named_tuples():
    source = StreamSource(pairs(7).map(Pair))
    assert source.element_spec == (tf.TensorSpec([], tf.int64),) * 2
    assert rows(EvaluationPipeline(source, 7), 1) == [list(range(7))]


def test_the_size_and_the_spec_are_the_data_sets():
    source = StreamSource(pairs(7))
    assert source.size == 7
    assert source.element_spec == (tf.TensorSpec([], tf.int64),) * 2


@pytest.mark.parametrize(
    ("dataset", "found"),
    [
        (pairs(7).repeat(), "infinite"),
        (pairs(7).filter(lambda x, y: x > 2), "unknown"),
        (pairs(0), "0"),
    ],
)
def test_the_number_of_examples_must_be_known(dataset, found):
    with pytest.raises(InputError) as error:
        StreamSource(dataset)
    assert f"Received: {found}. Use dataset.apply(tf.data.experimental.assert_cardinality(n))." in str(error.value)


def test_the_remedy_works():
    filtered = pairs(7).filter(lambda x, y: x > 2).apply(tf.data.experimental.assert_cardinality(4))
    assert sorted(sum(rows(Pipeline(StreamSource(filtered), 2, seed=0), 2), [])) == [3, 4, 5, 6]


def test_a_wrong_number_is_noticed():
    wrong = pairs(7).filter(lambda x, y: x > 2).apply(tf.data.experimental.assert_cardinality(5))
    with pytest.raises(tf.errors.FailedPreconditionError, match="contain 5 element"):
        rows(Pipeline(StreamSource(wrong), 2, seed=0), 8)


def test_examples_must_be_tuples():
    with pytest.raises(InputError, match="must be tuples"):
        StreamSource(tf.data.Dataset.range(5))


def test_the_shuffle_goes_through_a_buffer():
    assert rows(Pipeline(StreamSource(pairs(6), buffer_size=1), 6, seed=0), 2) == [[0, 1, 2, 3, 4, 5]] * 2
    [epoch] = rows(Pipeline(StreamSource(pairs(100), buffer_size=10), 100, seed=0), 1)
    assert epoch != sorted(epoch)
    assert all(example - place < 10 for place, example in enumerate(epoch))


def test_the_default_buffer_holds_a_small_data_set_and_bounds_the_memory_of_a_large_one():
    small = StreamSource(pairs(3000))
    assert small._buffer_size == 3000
    large = tf.data.Dataset.range(10**6).map(lambda i: (tf.zeros([224, 224, 3], tf.uint8), i))
    assert StreamSource(large)._buffer_size == 2**28 // (224 * 224 * 3 + 8)
    text = tf.data.Dataset.range(10**6).map(lambda i: (tf.as_string(i), i))
    assert StreamSource(text)._buffer_size == 1000


def test_transforms_see_batches_after_the_shuffle_and_compose():
    source = StreamSource(pairs(6)).map(lambda x, y: (x * 2, y, tf.ones_like(x))).map(lambda x, y, w: (x, y, w * 3))
    assert source.size == 6 and len(source.element_spec) == 3
    [(x, y, weight)] = EvaluationPipeline(source, 6).dataset([0], 1).as_numpy_iterator()
    np.testing.assert_array_equal(x, -2 * y)
    np.testing.assert_array_equal(weight, [3] * 6)


def test_structures_and_static_shapes_pass_through():
    dataset = tf.data.Dataset.range(6).map(lambda i: ({"a": tf.fill([2, 3], i)}, i))
    spec = Pipeline(StreamSource(dataset), 4, seed=0).dataset([0, 1], 2).element_spec
    assert spec == ({"a": tf.TensorSpec([2, 2, 3], tf.int64)}, tf.TensorSpec([2], tf.int64))
