"""Error feedback: what was sent and what is kept add up to the gradients; each replica has its own error."""

import numpy as np
import pytest
import tensorflow as tf

from tests.gradients.replicas import Runner
from tfdist.collectives import OneReplica
from tfdist.distribution.strategy import State
from tfdist.gradients import Bucketed, ErrorFeedback, Reducer, ReductionResult, Sum


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


@pytest.mark.parametrize("bucketed", [False, True])
def test_each_replica_keeps_its_own(mirrored4, bucketed):
    inner = Bucketed(Rounding(), 100, 100) if bucketed else Rounding()
    random = np.random.default_rng(0)
    values = [random.standard_normal((5, 4, *shape)).astype("float32") for shape in ((3,), (2, 2), ())]
    gradients = list(zip(*values, strict=True))
    steps = Runner(mirrored4, ErrorFeedback(inner), gradients[0]).steps(gradients)
    for i, value in enumerate(values):
        for step in steps:
            assert len({totals[i].tobytes() for totals in step.totals}) == 1
            np.testing.assert_allclose(sum(sent[i] for sent in step.sent), step.totals[0][i], rtol=1e-6)
        sent = sum(np.stack([mine[i] for mine in step.sent]) for step in steps)
        kept = np.stack([state[i] for state in steps[-1].state])
        np.testing.assert_allclose(sent + kept, value.sum(0), atol=1e-5)
        assert np.abs(kept).max() <= 0.5
        assert len({one.tobytes() for one in kept}) == 4, "not the same on all"


def test_witnesses_and_shapes_are_the_inner_ones():
    reduced = ErrorFeedback(Sum()).reduce([tf.constant([1.0])], [tf.constant([float("nan")])], OneReplica(), name="g")
    assert not np.isfinite(reduced.witnesses[0]).any(), "a kept NaN shows"
    assert not ErrorFeedback(Sum()).keeps_shapes
    assert ErrorFeedback(type("Shaped", (Sum,), {"keeps_shapes": True})()).keeps_shapes
