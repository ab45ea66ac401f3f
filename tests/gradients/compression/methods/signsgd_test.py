"""signSGD: the sign of the majority on every replica, and zeros without drift."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.collectives import OneReplica, Recording
from tfdist.errors import InputError
from tfdist.gradients import ErrorFeedback
from tfdist.gradients.compression import create
from tfdist.gradients.compression.methods.signsgd import SignSGD
from tfdist.grammar.spec import Spec

DRAWS = tf.constant(0)


def reduce_each(together, values):
    def step(collectives):
        return SignSGD().reduce([tf.constant(values[collectives.rank])], [DRAWS], collectives, name="g")

    return together(len(values), step)


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_majority(together, replicas):
    values = np.random.default_rng(0).standard_normal((replicas, 101)).astype("float32")
    found = reduce_each(together, values)
    for reduced in found:
        np.testing.assert_array_equal(reduced.totals[0], np.sign(np.sign(values).sum(0)))
    np.testing.assert_allclose(sum(reduced.sent[0] for reduced in found), found[0].totals[0], rtol=1e-6)


def test_the_size_of_gradients_does_not_matter(together):
    values = np.array([[1e-30, -5, 1e30], [1e-20, 7, 1], [-3, -1e-10, -1]], "float32")
    np.testing.assert_array_equal(reduce_each(together, values)[0].totals[0], [1, -1, 1])


def test_ties_are_zero(together):
    np.testing.assert_array_equal(reduce_each(together, [[1.0, -2.0], [-3.0, 4.0]])[0].totals[0], [0, 0])


def test_zeros_vote_by_a_coin_for_each_step_and_replica():
    reducer, zeros = SignSGD(), tf.zeros([9])

    def total(draws):
        return reducer.reduce([zeros], [tf.constant(draws)], OneReplica(), name="g").totals[0].numpy()

    totals = [total(draws) for draws in range(100)]
    assert all(abs(vector.sum()) == 9 for vector in totals), "alike in a step"
    assert abs(sum(vector[0] for vector in totals)) < 5 * np.sqrt(100)
    np.testing.assert_array_equal([total(draws) for draws in range(3)], totals[:3])


def test_one_bit_an_element(together):
    def payload(collectives):
        recording = Recording(collectives)
        SignSGD().reduce([tf.ones([8003])], [DRAWS], recording, name="g")
        return recording.payload_bytes

    assert together(2, payload) == [1004 + 4] * 2  # 1001 bytes of signs, padded to a multiple of 4, and 4 of the check


def test_it_has_neither_feedback_nor_parameters():
    assert not isinstance(create([Spec("signsgd")]), ErrorFeedback)
    with pytest.raises(InputError, match='signsgd has no parameter "block"'):
        create([Spec("signsgd", {"block": 8})])
