import numpy as np
import pytest
import tensorflow as tf

from tests.data.reading import everything
from tfdist.data import ArraySource, StreamSource, with_class_weight
from tfdist.errors import InputError


def make(kind, *arrays):
    return ArraySource(arrays) if kind == "source" else StreamSource(tf.data.Dataset.from_tensor_slices(arrays))


LABELS = {  # the labels, sample weights or none, weights by class, and what is found
    "1 for classes that are not named": ([0, 2, 1, 9, -1], None, {0: 0.5, 2: 3}, [0.5, 3, 1, 1, 1]),
    "multiplied": (np.array([0, 1, 1], np.uint8), [1.0, 2.0, 3.0], {1: 10}, [1, 20, 30]),
    "whole numbers": ([0, 1], np.array([1, 1], np.int32), {1: 0.5}, [1, 0.5]),
    "truth values": ([0, 1], np.array([1, 1], np.bool_), {1: 0.5}, [1, 0.5]),
    "a dim of 1": ([[0], [1]], None, {1: 4}, [1, 4]),
    "one for each token": ([[0, 1, 1], [1, 0, 0]], None, {1: 4}, [[1, 4, 4], [4, 1, 1]]),
    "rounded": ([[0.0], [0.9], [2.0], [3.0]], None, {1: 4, 2: 5}, [1, 4, 5, 1]),
    "labels that are truth values": ([False, True], None, {1: 4}, [1, 4]),
    "more dims than sample weights": ([[0, 1, 1], [1, 0, 0]], [2.0, 3.0], {1: 4}, [[2, 8, 8], [12, 3, 3]]),
    "fewer dims than sample weights": ([0, 1], [[1.0, 2.0], [3.0, 4.0]], {1: 4}, [[1, 2], [12, 16]]),
}


@pytest.mark.parametrize("kind", ["source", "stream"])
@pytest.mark.parametrize("case", LABELS)
def test_weights_follow_the_labels(kind, case):
    labels, given, table, expected = LABELS[case]
    arrays = [np.array(labels), *([] if given is None else [np.array(given)])]
    source = make(kind, np.zeros(len(labels)), *arrays)
    weighted = with_class_weight(source, table)
    found = everything(weighted)[2]
    np.testing.assert_array_equal(found, expected)
    if case == "multiplied":
        assert found.dtype == {"source": np.float32, "stream": np.float64}[kind]  # arrays are converted to floatx
    assert weighted.size == len(labels)
    assert isinstance(weighted, StreamSource) == isinstance(source, StreamSource)


@pytest.mark.parametrize("kind", ["source", "stream"])
@pytest.mark.parametrize(
    ("dtype", "one_hot"), [("float32", None), ("float64", True), ("uint8", True), ("int64", True), ("bool", True)]
)
def test_labels_may_be_one_hot(kind, dtype, one_hot):
    source = make(kind, np.zeros(2), np.array([[0, 0, 1], [0, 1, 0]], dtype), np.array([2.0, 3.0]))
    np.testing.assert_array_equal(everything(with_class_weight(source, {1: 4, 2: 5}, one_hot))[2], [10, 12])


@pytest.mark.parametrize("table", [{-1: 1.0}, {0: -1.0}, {0: float("nan")}, {0: float("inf")}, {}])
def test_wrong_tables_are_an_error(table):
    with pytest.raises(InputError, match="Classes and class weights must be finite"):
        with_class_weight(make("source", np.zeros(2), np.zeros(2, np.int32)), table)


@pytest.mark.parametrize("y", [np.array(["a", "b"]), {"a": np.zeros(2, np.int32)}])
def test_labels_must_be_one_tensor_of_numbers(y):
    with pytest.raises(InputError, match="need one label for each example, a number or a one-hot vector"):
        with_class_weight(make("source", np.zeros(2), y), {0: 1.0})
