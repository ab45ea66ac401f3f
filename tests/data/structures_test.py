import numpy as np
import pytest
import tensorflow as tf

from tfdist.data.structures import with_tuples

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
