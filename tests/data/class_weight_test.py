import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import ArraySource, EvaluationPipeline, StreamSource, with_class_weight
from tfdist.errors import InputError


def make(kind, *arrays):
    return ArraySource(arrays) if kind == "source" else StreamSource(tf.data.Dataset.from_tensor_slices(arrays))


def weights(source):
    [(_, _, weight)] = EvaluationPipeline(source, source.size).dataset([0], 1).as_numpy_iterator()
    return weight


@pytest.mark.parametrize("kind", ["source", "stream"])
class TestWeights:
    def test_they_follow_the_label_and_are_1_for_classes_that_are_not_named(self, kind):
        source = make(kind, np.zeros(5), np.array([0, 2, 1, 9, -1]))
        np.testing.assert_array_equal(weights(with_class_weight(source, {0: 0.5, 2: 3})), [0.5, 3, 1, 1, 1])

    def test_they_multiply_sample_weights(self, kind):
        source = make(kind, np.zeros(3), np.array([0, 1, 1], np.uint8), np.array([1.0, 2.0, 3.0]))
        found = weights(with_class_weight(source, {1: 10}))
        np.testing.assert_array_equal(found, [1, 20, 30])
        assert found.dtype == {"source": np.float32, "stream": np.float64}[kind]  # arrays are converted to floatx

    @pytest.mark.parametrize("dtype", [np.int32, np.bool_])
    def test_sample_weights_may_be_whole_numbers(self, kind, dtype):
        source = make(kind, np.zeros(2), np.array([0, 1]), np.array([1, 1], dtype))
        np.testing.assert_array_equal(weights(with_class_weight(source, {1: 0.5})), [1, 0.5])

    def test_labels_may_have_a_dim_of_1(self, kind):
        source = make(kind, np.zeros(2), np.array([[0], [1]]))
        np.testing.assert_array_equal(weights(with_class_weight(source, {1: 4})), [1, 4])

    def test_labels_may_be_one_for_each_token(self, kind):
        source = make(kind, np.zeros(2), np.array([[0, 1, 1], [1, 0, 0]]))
        np.testing.assert_array_equal(weights(with_class_weight(source, {1: 4})), [[1, 4, 4], [4, 1, 1]])

    def test_labels_that_are_not_integers_are_rounded(self, kind):
        source = make(kind, np.zeros(4), np.array([[0.0], [0.9], [2.0], [3.0]]))
        np.testing.assert_array_equal(weights(with_class_weight(source, {1: 4, 2: 5})), [1, 4, 5, 1])
        source = make(kind, np.zeros(2), np.array([False, True]))
        np.testing.assert_array_equal(weights(with_class_weight(source, {1: 4})), [1, 4])

    @pytest.mark.parametrize(
        ("dtype", "one_hot"), [("float32", None), ("float64", True), ("uint8", True), ("int64", True), ("bool", True)]
    )
    def test_labels_may_be_one_hot(self, kind, dtype, one_hot):
        source = make(kind, np.zeros(2), np.array([[0, 0, 1], [0, 1, 0]], dtype), np.array([2.0, 3.0]))
        np.testing.assert_array_equal(weights(with_class_weight(source, {1: 4, 2: 5}, one_hot)), [10, 12])

    def test_labels_may_have_more_dims_than_sample_weights(self, kind):
        source = make(kind, np.zeros(2), np.array([[0, 1, 1], [1, 0, 0]]), np.array([2.0, 3.0]))
        np.testing.assert_array_equal(weights(with_class_weight(source, {1: 4})), [[2, 8, 8], [12, 3, 3]])

    def test_sample_weights_may_have_more_dims_than_labels(self, kind):
        source = make(kind, np.zeros(2), np.array([0, 1]), np.array([[1.0, 2.0], [3.0, 4.0]]))
        np.testing.assert_array_equal(weights(with_class_weight(source, {1: 4})), [[1, 2], [12, 16]])

    def test_the_kind_and_the_size_stay(self, kind):
        source = make(kind, np.zeros(2), np.array([0, 1]))
        weighted = with_class_weight(source, {1: 4})
        assert weighted.size == 2
        assert isinstance(weighted, StreamSource) == isinstance(source, StreamSource)


@pytest.mark.parametrize("table", [{-1: 1.0}, {0: -1.0}, {0: float("nan")}, {0: float("inf")}, {}])
def test_wrong_tables_are_an_error(table):
    with pytest.raises(InputError, match="Classes and class weights must be finite"):
        with_class_weight(make("source", np.zeros(2), np.zeros(2, np.int32)), table)


@pytest.mark.parametrize("y", [np.array(["a", "b"]), {"a": np.zeros(2, np.int32)}])
def test_labels_must_be_one_tensor_of_numbers(y):
    with pytest.raises(InputError, match="need one label for each example, a number or a one-hot vector"):
        with_class_weight(make("source", np.zeros(2), y), {0: 1.0})
