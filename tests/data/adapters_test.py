import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import ArraySource, DataSet, StreamSource
from tfdist.data.adapters import as_data_set
from tfdist.errors import InputError

X = np.zeros((6, 4), np.float32)
Y = np.array([0, 1, 2, 0, 1, 2])
DATASET = tf.data.Dataset.from_tensor_slices((X, Y))


@pytest.mark.parametrize(
    ("value", "kind", "test", "classes"),
    [
        ((X, Y), ArraySource, False, 3),
        ([X, Y], ArraySource, False, 3),
        ((X, Y, np.ones(6)), ArraySource, False, 3),
        (((X, Y), (X[:2], Y[:2])), ArraySource, True, 3),
        (([X, Y], [X[:2], Y[:2]]), ArraySource, True, 3),
        ((X, X), ArraySource, False, None),
        (DATASET, StreamSource, False, None),
        ((DATASET, DATASET), StreamSource, True, None),
        (((X, Y), DATASET), ArraySource, True, 3),
        (ArraySource((X, Y)), ArraySource, False, None),
        ((ArraySource((X, Y)), DATASET), ArraySource, True, None),
    ],
)
def test_what_a_function_may_return(value, kind, test, classes):
    found = as_data_set(value, "mine")
    assert isinstance(found.train, kind) and (found.test is not None) == test
    assert (found.name, found.train.size, found.input_shape, found.classes) == ("mine", 6, (4,), classes)


def test_a_data_set_stays_as_it_is():
    mine = DataSet("own", ArraySource((X, Y)), None, (4,), 3)
    assert as_data_set(mine, "other") is mine


def test_structures_have_no_single_shape():
    found = as_data_set(({"a": X, "b": X}, {"c": Y}), "mine")
    assert (found.input_shape, found.classes, found.train.size) == ((), None, 6)


@pytest.mark.parametrize("value", [None, X, {"x": X, "y": Y}, "digits", (X,), (X, Y, X, Y)])
def test_anything_else_is_an_error(value):
    with pytest.raises(InputError, match="A data set must be arrays"):
        as_data_set(value, "mine")
