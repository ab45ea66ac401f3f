"""Weighted means over replicas and over micro-steps; the mean of moving statistics over replicas, for good and for a time."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.step.layer_state import averaged_statistics, replica_means

LOWEST = np.finfo("float32").min


def over_replicas(strategy, values, weights):
    """Returns each replica's result; `values` and `weights` have one row per replica."""

    def run():
        rank = strategy.collectives.rank
        return replica_means([tf.gather(values, rank)], tf.gather(weights, rank), strategy.collectives, name="test")[0]

    return [value.numpy() for value in strategy.local(tf.function(lambda: strategy.run(run))())]


def test_means_of_equal_values_are_exact(mirrored3):
    values = tf.constant([[LOWEST, 1.2e-38, 16777215.0]] * 3)
    np.testing.assert_array_equal(over_replicas(mirrored3, values, tf.constant([1 / 3, 0.1, 7.0])), values)


def test_values_without_weight_do_not_count(mirrored3):
    values = tf.constant([[np.nan], [2.0], [np.inf]])
    np.testing.assert_array_equal(over_replicas(mirrored3, values, tf.constant([0, 3, 0])), [[2.0]] * 3)


def test_without_any_weight_each_replica_keeps_its_values(mirrored3):
    values = tf.constant([[1.0], [2.0], [3.0]])
    np.testing.assert_array_equal(over_replicas(mirrored3, values, tf.zeros([3])), values)


@pytest.mark.parametrize("strategy", ["mirrored2", "mirrored4"])
def test_moving_statistics_are_averaged(strategy, request):
    strategy = request.getfixturevalue(strategy)
    n = strategy.replicas
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])
    gamma, beta, mean, variance, seed = model.variables

    def drift():
        rank = tf.cast(strategy.collectives.rank, tf.float32)
        mean.assign(tf.constant([1.0, 2.0, 4.0]) * rank)
        variance.assign(tf.ones(3) + rank)

    def assert_averaged():
        middle = (n - 1) / 2
        np.testing.assert_array_equal(strategy.local(mean.value), [np.array([1.0, 2.0, 4.0]) * middle] * n)
        np.testing.assert_array_equal(strategy.local(variance.value), [[1 + middle] * 3] * n)

    tf.function(lambda: strategy.run(drift))()
    before = [v.numpy() for v in strategy.local(seed.value)]
    statistics = averaged_statistics(model, strategy)
    with statistics():
        assert_averaged()
    np.testing.assert_array_equal(strategy.local(mean.value), [np.array([1.0, 2.0, 4.0]) * i for i in range(n)])
    np.testing.assert_array_equal(strategy.local(variance.value), [[1.0 + i] * 3 for i in range(n)])
    statistics.assign()
    assert_averaged()
    np.testing.assert_array_equal([v.numpy() for v in strategy.local(seed.value)], before)
    np.testing.assert_array_equal(gamma, [1, 1, 1])
    np.testing.assert_array_equal(beta, [0, 0, 0])
