"""The mean of moving statistics over replicas, for good and for a time."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.step.averaged_statistics import AveragedStatistics


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
    statistics = AveragedStatistics(model, strategy)
    with statistics():
        assert_averaged()
    np.testing.assert_array_equal(strategy.local(mean.value), [np.array([1.0, 2.0, 4.0]) * i for i in range(n)])
    np.testing.assert_array_equal(strategy.local(variance.value), [[1.0 + i] * 3 for i in range(n)])
    statistics.average()
    assert_averaged()
    np.testing.assert_array_equal([v.numpy() for v in strategy.local(seed.value)], before)
    np.testing.assert_array_equal(gamma, [1, 1, 1])
    np.testing.assert_array_equal(beta, [0, 0, 0])
