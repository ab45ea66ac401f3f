"""Collectives of a single replica return their inputs."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives import OneReplica

TENSORS = [tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant([5, 6, 7, 8])]


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
def test_tensors_come_back(operation):
    results = getattr(OneReplica(), operation)(TENSORS, name="call")
    assert isinstance(results, list)
    for result, tensor in zip(results, TENSORS, strict=True):
        np.testing.assert_array_equal(result, tensor)
        assert result.dtype == tensor.dtype


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
def test_nothing_is_copied(operation):
    assert all(a is b for a, b in zip(getattr(OneReplica(), operation)(TENSORS, name="x"), TENSORS, strict=True))


def test_size_and_rank():
    assert (OneReplica().size, OneReplica().rank) == (1, 0)
    OneReplica().barrier(name="barrier")
