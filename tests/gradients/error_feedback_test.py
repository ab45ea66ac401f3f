"""Error feedback: what was sent and what is kept add up to the gradients; each replica has its own error."""

import numpy as np
import tensorflow as tf

from tfdist.collectives import OneReplica
from tfdist.distribution.strategy import State
from tfdist.gradients import ErrorFeedback, Reducer, ReductionResult, Sum


class Rounding(Reducer):
    biased = True

    def state(self, specs):
        return [State(f"{spec.name}/calls", (), tf.int32, False) for spec in specs]

    def reduce(self, tensors, state, collectives, *, name):
        sent = [tf.round(tensor) for tensor in tensors]
        totals = collectives.all_reduce(sent, name=name)
        return ReductionResult(totals, sent, [calls + 1 for calls in state], totals)


def test_what_is_left_out_is_sent_later():
    feedback, error = ErrorFeedback(Rounding()), [tf.zeros([2]), tf.constant(0)]
    totals = []
    for _ in range(10):
        [total], _, error, _ = feedback.reduce([tf.constant([0.3, -1.2])], error, OneReplica(), name="g")
        totals.append(total.numpy())
    np.testing.assert_array_equal(sum(totals), [3, -12])
    np.testing.assert_array_equal(np.unique([total[0] for total in totals]), [0, 1])
    assert int(error[1]) == 10


def test_witnesses_and_shapes_are_the_inner_ones():
    reduced = ErrorFeedback(Sum()).reduce([tf.constant([1.0])], [tf.constant([float("nan")])], OneReplica(), name="g")
    assert not np.isfinite(reduced.witnesses[0]).any(), "a kept NaN shows"
    assert not ErrorFeedback(Sum()).keeps_shapes
    assert ErrorFeedback(type("Shaped", (Sum,), {"keeps_shapes": True})()).keeps_shapes
