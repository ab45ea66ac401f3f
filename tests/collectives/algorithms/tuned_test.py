"""Collectives with algorithms: what takes one, and what stays the engine's."""

import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.cluster.topology import Topology
from tfdist.collectives import OneReplica, RecordingCollectives
from tfdist.collectives.all_reduce_algorithms import TunedCollectives
from tfdist.config.all_reduce import MAX_MESSAGE_BYTES, TFDIST_ALGORITHMS, AlgorithmTable, AllReduce, Band
from tfdist.distribution.all_reduce_plan import AllReducePlan

TOPOLOGIES = {2: "2", 3: "3", 4: "2,2"}
VALUES = np.random.default_rng(0).standard_normal((4, 5, 3))


@pytest.fixture(scope="module", params=[2, 3, 4])
def strategy(request):
    """Strategies with two, three and four replicas."""
    return tfdist.load_strategy("mirrored", devices=request.param, environment={})


def tuned_on(strategy, table, engine=None):
    return TunedCollectives(
        engine or strategy.collectives, Topology.parse(TOPOLOGIES[strategy.replicas], strategy.replicas), table
    )


@pytest.mark.parametrize(
    ("strategy", "name"),
    [(n, name) for n in TOPOLOGIES for name in TFDIST_ALGORITHMS if n == 4 or name != "hierarchical"],
    indirect=["strategy"],
)
def test_sums_and_means_equal_the_engine_s(strategy, compiled, name):
    collectives, n = tuned_on(strategy, AlgorithmTable.uniform(name)), strategy.replicas

    def sums(engine):
        x = tf.gather(tf.constant(VALUES), collectives.rank)
        single = tf.cast(x[0], tf.float32)
        total, of_single, scalar = collectives.all_reduce([x, single, x[0, 0]], name="sum")
        [mean] = collectives.all_reduce([x], "mean", name="mean")
        return total, of_single, scalar, mean, engine.all_reduce([x], name="engine")[0]

    total, of_single, scalar, mean, engine = zip(*compiled(strategy, sums), strict=True)
    for values in (total, of_single, scalar, mean):
        assert len({value.tobytes() for value in values}) == 1
    np.testing.assert_allclose(total[0], engine[0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(total[0], VALUES[:n].sum(0), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(mean[0], VALUES[:n].mean(0), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(of_single[0], VALUES[:n, 0].sum(0), rtol=1e-5, atol=1e-6)
    assert scalar[0].shape == () and of_single[0].dtype == np.float32


def calls_of(strategy, function, table):
    """Returns the operations and names of the calls of the first replica."""
    recordings = []

    def replica():
        recordings.append(RecordingCollectives(strategy.collectives))
        function(tuned_on(strategy, table, recordings[-1]))
        return tf.zeros([])

    tf.function(lambda: strategy.run(replica), autograph=False).get_concrete_function()
    return [(call.operation, call.name) for call in recordings[0].calls]


def test_what_takes_no_algorithm_is_one_call_of_the_engine(strategy):
    def mixed(c):
        x = tf.gather(tf.constant(VALUES), c.rank)
        unknown = tf.boolean_mask(x, x[:, 0] == x[:, 0])
        c.all_reduce([tf.cast(x, tf.int32), tf.ensure_shape(unknown, [None, 3])], name="other")
        c.all_reduce([x], "max", name="max")

    found = calls_of(strategy, mixed, AlgorithmTable.uniform("ring"))
    assert found == [("all_reduce", "other"), ("all_reduce", "max")]


def test_one_message_for_each_dtype(strategy):
    def two(c):
        x = tf.gather(tf.constant(VALUES), c.rank)
        c.all_reduce([x, tf.cast(x, tf.float32), x[0], tf.cast(x, tf.int64)], name="s")

    found = calls_of(strategy, two, AlgorithmTable.uniform("ring"))
    assert {name.split("/")[2].partition("_")[0] for operation, name in found if operation == "send"} == {
        "float64",
        "float32",
    }
    assert found[-1] == ("all_reduce", "s"), "integers"


def test_the_size_decides(strategy):
    table = AlgorithmTable((Band(0, 100, "ring"), Band(101, MAX_MESSAGE_BYTES, "engine")))

    def sizes(c):
        x = tf.gather(tf.constant(VALUES), c.rank)
        c.all_reduce([x[0]], name="small")
        c.all_reduce([x], name="large")

    found = calls_of(strategy, sizes, table)
    assert {name.partition("/")[0] for operation, name in found if operation == "send"} == {"small"}
    assert ("all_reduce", "large") in found


def test_eagerly_it_is_the_engine_s(strategy):
    collectives = tuned_on(strategy, AlgorithmTable.uniform("ring"))
    results = strategy.run(lambda: collectives.all_reduce([tf.ones([3])], name="eager")[0])
    assert [value.numpy().tolist() for value in strategy.local(results)] == [
        [strategy.replicas] * 3
    ] * strategy.replicas


@pytest.mark.parametrize("text", ["engine", "ring", "auto", "hierarchical"])
def test_one_replica_has_no_algorithms(text):
    assert AllReducePlan(AllReduce(text), Topology((0,)), None).tune(OneReplica()) is None
