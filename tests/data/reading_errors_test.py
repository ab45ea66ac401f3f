import itertools

import numpy as np
import pytest
import tensorflow as tf

from tfdist.data import ArraySource, explained_reading
from tfdist.data.reading_errors import first_unreadable
from tfdist.errors import InputError

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
    with pytest.raises(InputError, match="file 3 is broken"), explained_reading(Explained((ONE, ONE))):
        broken_element()
    with pytest.raises(InputError, match="file 3"), explained_reading(Explained((ONE, ONE)).map(lambda x, y: (x, y))):
        broken_element()


def test_other_errors_are_unchanged():
    with pytest.raises(tf.errors.InvalidArgumentError), explained_reading(ArraySource((ONE, ONE))):
        broken_element()
    with pytest.raises(tf.errors.InvalidArgumentError), explained_reading(Explained((ONE, ONE))):
        tf.ensure_shape(tf.zeros([2]), [1])
    with pytest.raises(ValueError), explained_reading(Explained((ONE, ONE))):
        raise ValueError


def test_the_first_example_that_cannot_be_read_is_found():
    def check(index):
        if index >= 1500:
            raise InputError(f"example {index}")

    assert str(first_unreadable(check, 5000)) == "example 1500"
    assert first_unreadable(check, 1500) is None
    clock = itertools.count(step=10)
    assert first_unreadable(check, 5000, seconds=5, clock=lambda: float(next(clock))) is None
