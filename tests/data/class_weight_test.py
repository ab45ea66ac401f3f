import numpy as np
import pytest
import tensorflow as tf

from tests.data.reading import everything
from tfdist.data import ArraySource, StreamSource, with_class_weight
from tfdist.errors import InputError


def make(kind, *arrays):
    return ArraySource(arrays) if kind == "source" else StreamSource(tf.data.Dataset.from_tensor_slices(arrays))


LABELS = {  # the labels, weights by class, and what is found
    "1 for classes that are not named": ([0, 2, 1, 9, -1], {0: 0.5, 2: 3}, [0.5, 3, 1, 1, 1]),
    "bytes": (np.array([0, 1, 1], np.uint8), {1: 10}, [1, 10, 10]),
    "a dim of 1": ([[0], [1]], {1: 4}, [1, 4]),
    "one for each token": ([[0, 1, 1], [1, 0, 0]], {1: 4}, [[1, 4, 4], [4, 1, 1]]),
    "rounded": ([[0.0], [0.9], [2.0], [3.0]], {1: 4, 2: 5}, [1, 4, 5, 1]),
    "labels that are truth values": ([False, True], {1: 4}, [1, 4]),
}


@pytest.mark.parametrize("kind", ["source", "stream"])
@pytest.mark.parametrize("case", LABELS)
def test_weights_follow_the_labels(kind, case):
    labels, table, expected = LABELS[case]
    source = make(kind, np.zeros(len(labels)), np.array(labels))
    weighted = with_class_weight(source, table)
    np.testing.assert_array_equal(everything(weighted)[2], expected)
    assert weighted.size == len(labels)
    assert isinstance(weighted, StreamSource) == isinstance(source, StreamSource)


@pytest.mark.parametrize("kind", ["source", "stream"])
@pytest.mark.parametrize(
    ("dtype", "one_hot"), [("float32", None), ("float64", True), ("uint8", True), ("int64", True), ("bool", True)]
)
def test_labels_may_be_one_hot(kind, dtype, one_hot):
    source = make(kind, np.zeros(2), np.array([[0, 0, 1], [0, 1, 0]], dtype))
    np.testing.assert_array_equal(everything(with_class_weight(source, {1: 4, 2: 5}, one_hot))[2], [5, 4])


@pytest.mark.parametrize("table", [{-1: 1.0}, {0: -1.0}, {0: float("nan")}, {0: float("inf")}, {}])
def test_wrong_tables_are_an_error(table):
    with pytest.raises(InputError, match="Classes and class weights must be finite"):
        with_class_weight(make("source", np.zeros(2), np.zeros(2, np.int32)), table)


@pytest.mark.parametrize("y", [np.array(["a", "b"]), {"a": np.zeros(2, np.int32)}])
def test_labels_must_be_one_tensor_of_numbers(y):
    with pytest.raises(InputError, match="need one label for each example, a number or a one-hot vector"):
        with_class_weight(make("source", np.zeros(2), y), {0: 1.0})


def test_class_weights_and_sample_weights_exclude_each_other():
    with pytest.raises(InputError, match="Class weights and sample weights are mutually exclusive. Received: both"):
        with_class_weight(make("source", np.zeros(2), np.zeros(2, np.int32), np.ones(2)), {0: 1.0})
