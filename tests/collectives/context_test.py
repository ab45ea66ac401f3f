"""The collectives that a layer finds in its context."""

import pytest
import tensorflow as tf

from tfdist.collectives import OneReplica, Recording, current, using


def test_outside_of_a_step_there_is_one_replica():
    assert isinstance(current(), OneReplica)


def test_using_is_undone_even_by_an_error():
    mine = Recording(OneReplica())
    with pytest.raises(KeyError), using(mine):
        assert current() is mine
        raise KeyError
    assert isinstance(current(), OneReplica)


def test_a_step_finds_its_strategy_s(strategy, run):
    def step(collectives):
        assert current() is collectives
        return tf.constant(0)

    assert len(run(strategy, step)) == strategy.replicas
    assert isinstance(current(), OneReplica)
