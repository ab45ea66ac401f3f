"""Rounding to levels: to the nearest one, and unbiased stochastic rounding."""

import numpy as np
import tensorflow as tf

from tfdist.gradients.compression.kernels.counter_rng import rounding_noise
from tfdist.gradients.compression.kernels.levels import relative, rounded


def test_to_the_nearest_even_at_ties():
    y = np.linspace(-127, 127, 509, dtype="float32")  # in steps of 1/2
    np.testing.assert_array_equal(rounded(tf.constant(y), -127, 127), np.rint(y) + 127)


def test_with_noise_each_number_is_itself_on_average():
    size = 40_000
    for value in (-3.0, -2.7, 0.0, 0.1, 0.5, 2.999, 3.0):
        numbers = rounded(tf.fill([size], value), -3, 3, rounding_noise(tf.constant([1, 2]), size)).numpy() - 3.0
        assert set(np.unique(numbers)) <= {np.floor(value), np.ceil(value)}
        spread = np.sqrt((value - np.floor(value)) * (np.ceil(value) - value) / size)
        assert abs(numbers.mean() - value) <= 5 * spread


def test_noise_does_not_carry_beyond_the_levels():
    over, noise = tf.constant([np.nextafter(np.float32(127), np.float32(128))]), tf.constant([0.4999998])
    assert int(rounded(over, -127, 127, noise)[0]) == 254
    assert int(rounded(-over, -127, 127, -noise)[0]) == 0


def test_relative_is_within_bounds_for_any_scale():
    scales = tf.constant([0.0, 1e-45, 2.0**-126, 1.0, 3e38])
    np.testing.assert_array_equal(relative(scales, scales), [0, 0, 1, 1, 1])
    np.testing.assert_array_equal(relative(-0.5 * scales[3:], scales[3:]), [-0.5, -0.5])
