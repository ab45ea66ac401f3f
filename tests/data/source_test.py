"""Sources of examples: their arrays, checksums and samples, how they are split, and what is said when they cannot be read."""

import hypothesis
import numpy as np
import pandas
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tfdist.data import ArraySource, Pipeline, Source, explain_reading_errors
from tfdist.data.reading_errors import first_unreadable
from tfdist.data.row_partition import with_tuples
from tfdist.data.source import stratified_split
from tfdist.errors import InputError


def one_batch(source, size):
    return next(Pipeline(source, size, seed=0).dataset([0], 1).as_numpy_iterator())


def test_arrays_keep_their_dtypes_and_structure():
    x = {"image": np.arange(12, dtype=np.uint8).reshape(3, 2, 2), "name": np.array(["a", "b", "c"])}
    source = ArraySource((x, np.arange(3, dtype=np.int16)))
    assert source.size == 3
    assert source.element_spec == (
        {"image": tf.TensorSpec([2, 2], tf.uint8), "name": tf.TensorSpec([], tf.string)},
        tf.TensorSpec([], tf.int16),
    )
    got, label = source.fetch(tf.constant([2, 0, 2], tf.int64))
    np.testing.assert_array_equal(got["image"], x["image"][[2, 0, 2]])
    assert got["name"].numpy().tolist() == [b"c", b"a", b"c"]
    np.testing.assert_array_equal(label, [2, 0, 2])


def test_floating_point_numbers_and_columns_are_those_of_keras():
    """In Keras's `fit`, a column of a table is [rows, 1]: without the dim, a custom loss compared each row with all others."""
    table = pandas.DataFrame({"a": [1.5, 2.5, 3.5], "b": [True, False, True]})
    source = ArraySource((table, table["a"], np.ones(3, np.float16)))
    assert source.element_spec == tuple(tf.TensorSpec(shape, tf.float32) for shape in ([2], [1], []))
    x, y, _ = source.fetch(tf.constant([1, 0], tf.int64))
    np.testing.assert_array_equal(x, [[2.5, 0], [1.5, 1]])
    np.testing.assert_array_equal(y, [[2.5], [1.5]])


@pytest.mark.parametrize(
    ("part", "rule"),
    [(None, "Examples must consist of arrays"), (tf.ragged.constant([[1], [2, 3], [4]]), "Arrays must")],
    ids=["None", "ragged"],
)
def test_what_is_no_array_is_refused(part, rule):
    with pytest.raises(InputError, match=rule):
        ArraySource(({"a": np.zeros(3), "b": part}, np.zeros(3)))


def test_arrays_are_copied():
    x = np.zeros(3)
    source = ArraySource((x, x))
    x[:] = 1
    np.testing.assert_array_equal(source.fetch(tf.constant([0, 1, 2], tf.int64))[0], np.zeros(3))


def test_transforms_see_batches_and_compose():
    source = ArraySource((np.arange(4, dtype=np.uint8), np.arange(4)), lambda x, y: (tf.cast(x, tf.float32) / 2, y))
    mapped = source.map(lambda x, y: (x, y, tf.ones_like(x))).map(lambda x, y, w: ({"x": x + 1}, y, w * 3))
    assert mapped.size == 4
    number = tf.TensorSpec([], tf.float32)
    assert mapped.element_spec == ({"x": number}, tf.TensorSpec([], tf.int64), number)
    x, y, weight = one_batch(mapped, 4)
    np.testing.assert_array_equal(x["x"], y / 2 + 1)
    np.testing.assert_array_equal(weight, [3, 3, 3, 3])


def test_a_source_of_ones_own_needs_a_size_and_a_fetch_and_a_sample_is_from_all_over_it():
    """Examples of a class are often stored together."""

    class Squares(Source):
        size = 1000

        def fetch(self, indices):
            return indices, indices**2

    x, y = one_batch(Squares(), 10)
    np.testing.assert_array_equal(y, x**2)
    assert Squares().element_spec == (tf.TensorSpec([], tf.int64),) * 2
    assert Squares().preview(4)[0].numpy().tolist() == [0, 250, 500, 750]
    assert Squares().map(lambda x, y: (x + 1, y)).preview(2000)[0].numpy().tolist() == list(range(1, 1001))


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ((np.zeros(0), np.zeros(0)), "at least 1"),
        ((np.zeros(3), np.float32(1)), "same first dim"),
        (np.zeros(3), r"must be tuples \(x, y\)"),
        ((np.zeros(3),), "tuple of 1"),
        ({"x": np.zeros(3), "y": np.zeros(3)}, "dict of 2"),
        ((), "tuple of 0"),
        (({}, {}), "no arrays"),
    ],
)
def test_arrays_that_are_no_examples_are_an_error(arrays, says):
    with pytest.raises(InputError, match=says):
        ArraySource(arrays)


def test_a_sample_of_arrays_in_memory_is_all_of_them_unless_they_are_large(monkeypatch):
    source = ArraySource((np.arange(100), np.arange(100)))
    assert len(source.preview(4)[0]) == 100 == len(source.map(lambda x, y: (x, y)).preview(4)[0])
    monkeypatch.setattr("tfdist.data.source._PREVIEW_BYTES", 160)
    assert source.preview(4)[0].numpy().tolist() == list(range(0, 100, 10))


def test_checksums_tell_arrays_apart():
    x = np.arange(40, dtype="float32").reshape(20, 2)
    other = x.copy()
    other[17, 1] += 1
    found = [ArraySource(arrays).checksum for arrays in ((x, x), (x.copy(), x), (other, x), (x, other), (x[::-1], x))]
    assert found[0] == found[1] and len(set(found[1:])) == 4
    assert ArraySource((x, x)).in_order().map(lambda x, y: (x + 1, y)).checksum == found[0]
    words = np.array(["a", "b"])
    assert ArraySource((words, words)).checksum != ArraySource((words, words[::-1])).checksum


A, B = np.zeros((3, 2)), tf.zeros([3])


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ([A, B], (A, B)),
        ((A, [B]), (A, (B,))),
        ({"a": [A, B], "b": A}, {"a": (A, B), "b": A}),
        ([{"a": A}, B], ({"a": A}, B)),
        ([[A], [B]], ((A,), (B,))),
        ([1, 2, 3], [1, 2, 3]),
        ([[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [3.0, 4.0]]),
        (["a", "b"], ["a", "b"]),
        (list(np.arange(3)), [0, 1, 2]),
        ([], []),
        (A, A),
    ],
)
def test_lists_of_arrays_are_tuples_and_other_lists_stay(given, wanted):
    found = with_tuples(given)
    tf.nest.assert_same_structure(found, wanted)
    assert all(a is b or a == b for a, b in zip(tf.nest.flatten(found), tf.nest.flatten(wanted), strict=True))
    assert isinstance(found, type(wanted))


@hypothesis.given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=60), share=st.floats(0, 1))
@hypothesis.settings(derandomize=True)
def test_parts_are_disjoint_complete_and_stratified(labels, share):
    labels = np.array(labels)
    test_size = int(share * len(labels))
    train, test = stratified_split(labels, test_size)
    assert len(test) == test_size
    np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), np.arange(len(labels)))
    for label in range(5):
        assert abs((labels[test] == label).sum() - (labels == label).sum() * test_size / len(labels)) < 1


def test_the_split_is_the_same_each_time_and_in_random_order():
    labels = np.repeat(np.arange(10), 50)
    train, test = stratified_split(labels, 100)
    again = stratified_split(labels, 100)
    np.testing.assert_array_equal(train, again[0])
    np.testing.assert_array_equal(test, again[1])
    assert len(np.unique(labels[train][:40])) > 5


ONE = np.ones(1)


class Explained(ArraySource):
    """A source that knows why it cannot be read."""

    def explain(self, error):
        """See base class."""
        return InputError("file 3 is broken")


def broken_element():
    dataset = tf.data.Dataset.range(1).map(lambda number: tf.ensure_shape(tf.fill([number + 2], 0), [1]))
    return next(iter(dataset))


def test_an_error_while_reading_is_explained():
    with pytest.raises(InputError, match="file 3 is broken"), explain_reading_errors(Explained((ONE, ONE))):
        broken_element()
    with (
        pytest.raises(InputError, match="file 3"),
        explain_reading_errors(Explained((ONE, ONE)).map(lambda x, y: (x, y))),
    ):
        broken_element()


def test_other_errors_are_unchanged():
    with pytest.raises(tf.errors.InvalidArgumentError), explain_reading_errors(ArraySource((ONE, ONE))):
        broken_element()
    with pytest.raises(tf.errors.InvalidArgumentError), explain_reading_errors(Explained((ONE, ONE))):
        tf.ensure_shape(tf.zeros([2]), [1])
    with pytest.raises(ValueError), explain_reading_errors(Explained((ONE, ONE))):
        raise ValueError


def test_the_first_example_that_cannot_be_read_is_found():
    def check(index):
        if index >= 1500:
            raise InputError(f"example {index}")

    assert str(first_unreadable(check, 5000)) == "example 1500"
    assert first_unreadable(check, 1500) is None
    assert first_unreadable(check, 5000, seconds=0) is None
