"""Collectives in tf.distribute's replica context, what it rejects and supports; and those that a layer finds in a step."""

import pytest
import tensorflow as tf

from tfdist.collectives import OneReplica, RecordingCollectives, collectives_scope, current
from tfdist.collectives.replica_context import ReplicaContextCollectives


def test_a_function_s_own_argument_can_be_reduced(mirrored2):
    """The engine by itself rejects this with "destinations can not be empty"."""

    @tf.function
    def step(x):
        return mirrored2.run(lambda v: mirrored2.collectives.all_reduce([v], name="reduce")[0], x)

    assert [float(x) for x in mirrored2.local(step(tf.constant(3.0)))] == [6.0, 6.0]


def test_outside_of_a_replica_function_it_says_so(mirrored2):
    with mirrored2.scope(), pytest.raises(RuntimeError, match="inside `strategy.run`"):
        mirrored2.collectives.all_reduce([tf.constant(1.0)], name="reduce")


def test_options_reach_the_engine(mirrored2, monkeypatch):
    seen = []
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=123)

    class Context:
        def all_reduce(self, op, tensors, given):
            seen.append((op, given))
            return tensors

        def all_gather(self, tensors, axis, given):
            seen.append((axis, given))
            return tensors

    monkeypatch.setattr("tfdist.collectives.replica_context._context", Context)
    collectives = ReplicaContextCollectives(2, options)
    collectives.all_reduce([tf.constant(1.0)], "mean", name="reduce")
    collectives.all_gather([tf.constant([1.0])], name="gather")
    assert seen == [("MEAN", options), (0, options)]


def test_using_is_undone_even_by_an_error():
    mine = RecordingCollectives(OneReplica())
    with pytest.raises(KeyError), collectives_scope(mine):
        assert current() is mine
        raise KeyError
    assert isinstance(current(), OneReplica)


def test_a_step_finds_its_strategy_s(strategy, run):
    def step(collectives):
        assert current() is collectives
        return tf.constant(0)

    assert len(run(strategy, step)) == strategy.replicas
    assert isinstance(current(), OneReplica)
