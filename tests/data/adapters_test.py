import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import ArraySource, DatasetSplits, StreamSource
from tfdist.data.inputs import as_dataset_splits, fit_data
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
    found = as_dataset_splits(value, "mine")
    assert isinstance(found.train, kind) and (found.test is not None) == test
    assert (found.name, found.train.size, found.input_shape, found.classes) == ("mine", 6, (4,), classes)


def test_a_dataset_stays_as_it_is():
    mine = DatasetSplits("own", ArraySource((X, Y)), None, (4,), 3)
    assert as_dataset_splits(mine, "other") is mine


def test_structures_have_no_single_shape():
    found = as_dataset_splits(({"a": X, "b": X}, {"c": Y}), "mine")
    assert (found.input_shape, found.classes, found.train.size) == ((), None, 6)


@pytest.mark.parametrize("value", [X, (X,), {"a": X}, tf.data.Dataset.from_tensor_slices(X).batch(2)])
def test_inputs_alone_have_no_targets(value):
    found = as_dataset_splits(value, "mine").train
    x, y = found.element_spec
    assert (tf.nest.flatten(x)[0].shape, y, found.size) == ((4,), (), 6)


@pytest.mark.parametrize("value", [None, "digits", (X, Y, X, Y)])
def test_anything_else_is_an_error(value):
    with pytest.raises(InputError, match="A dataset must be arrays"):
        as_dataset_splits(value, "mine")


def sizes(*arguments):
    found = fit_data(*arguments)
    return found.train.size, found.test and found.test.size, len(found.train.element_spec)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (((X, Y), None, None, None, 0.0), (6, None, 2)),
        ((X, Y, None, None, 0.0), (6, None, 2)),
        ((X, Y, np.ones(6), None, 0.0), (6, None, 3)),
        ((X, Y, None, (X[:2], Y[:2]), 0.0), (6, 2, 2)),
        ((DATASET, None, None, DATASET, 0.0), (6, 6, 2)),
        ((X, Y, None, None, 0.5), (3, 3, 2)),
        ((X, Y, np.ones(6), None, 0.2), (4, 2, 3)),  # int(6 * 0.8), as in Keras
        (((X, Y), None, None, None, 0.5), (3, 3, 2)),
    ],
)
def test_the_data_arguments_of_keras_fit(arguments, wanted):
    assert sizes(*arguments) == wanted


def test_the_last_rows_are_split_off():
    rows = np.arange(6, dtype=np.float32)
    found = fit_data(rows, Y, None, None, 1 / 3)
    assert [next(iter(part.fetch(tf.range(part.size)))).numpy().tolist() for part in (found.train, found.test)] == [
        [0.0, 1.0, 2.0, 3.0],
        [4.0, 5.0],
    ]


def test_with_targets_nothing_is_a_pair_of_datasets():
    """Tuples of two inputs and two outputs look like two pairs (x, y)."""
    found = fit_data((X, X), (Y, Y), None, None, 0.0)
    assert found.test is None
    assert [len(part) for part in found.train.element_spec] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((X, None, np.ones(6), None, 0.0), "`sample_weight` needs arrays `x` and `y`"),
        ((X, Y, None, (X, Y), 0.5), "`validation_data` and `validation_split` are mutually exclusive"),
        ((((X, Y), (X, Y)), None, None, None, 0.5), "`validation_split` requires arrays. Received: a tuple"),
        ((X[:1], Y[:1], None, None, 0.5), "leave rows for training and validation. Received: 0.5 of 1 rows"),
    ],
)
def test_data_arguments_that_are_refused(arguments, words):
    with pytest.raises(InputError, match=words):
        fit_data(*arguments)


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((8, 3)),
        tf.zeros((8, 3)),
        {"a": np.zeros((8, 3))},
        [np.zeros((8, 3))] * 2,
        (np.zeros((8, 3)), None),
        (np.zeros((8, 3)), np.zeros(8), None),
    ],
)
def test_inputs_alone_are_split(x):
    found = fit_data(x, None, None, None, 0.25)
    assert (found.train.size, found.test.size) == (6, 2)
