"""Random numbers: their moments, and independence of seeds; rounding to levels with and without them."""

import numpy as np
import tensorflow as tf

from tfdist.gradients.compression.random_draws import fold_in, round_to_uint8, rounding_noise
from tfdist.gradients.compression.reducers import seed_of

SIZE = 100_000
SEED = tf.constant([3, 4])


def test_noise_is_uniform_in_the_open_interval():
    noise = rounding_noise(SEED, SIZE).numpy()
    assert noise.dtype == np.float32
    assert np.abs(noise).max() < 0.5
    deviation = 5 / np.sqrt(12 * SIZE)
    assert abs(noise.mean(dtype="float64")) < deviation
    assert abs((noise**2).mean(dtype="float64") - 1 / 12) < deviation
    counts, _ = np.histogram(noise, 64, (-0.5, 0.5))
    assert ((counts - SIZE / 64) ** 2 / (SIZE / 64)).sum() < 63 + 5 * np.sqrt(2 * 63), "chi-squared, 63 degrees"


def test_neighbours_are_not_correlated():
    noise = rounding_noise(SEED, SIZE).numpy().astype("float64")
    for apart in (1, 2, 8, 1024):
        assert abs(np.corrcoef(noise[apart:], noise[:-apart])[0, 1]) < 5 / np.sqrt(SIZE)


def test_neighbouring_seeds_are_not_correlated():
    first = rounding_noise(seed_of("a", 0, 0), SIZE)
    for other in (seed_of("a", 1, 0), seed_of("a", 0, 1), seed_of("b", 0, 0), fold_in(seed_of("a", 0, 0), 0)):
        second = rounding_noise(other, SIZE)
        assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(SIZE)


def test_seeds_differ_and_repeat():
    draws = [(name, draws, rank) for name in ("a", "b") for draws in range(20) for rank in range(20)]
    seeds = {tuple(seed_of(*each).numpy()) for each in draws}
    assert len(seeds) == len(draws)
    assert tuple(seed_of("a", tf.constant(3), tf.constant(5)).numpy()) == tuple(seed_of("a", 3, 5).numpy())
    assert seed_of("a", 2**31 - 1, 0).dtype == tf.int32


def test_rounding_is_to_the_nearest_even_at_ties():
    y = np.linspace(-127, 127, 509, dtype="float32")  # in steps of 1/2
    np.testing.assert_array_equal(round_to_uint8(tf.constant(y), -127, 127), np.rint(y) + 127)


def test_noise_does_not_carry_beyond_the_levels():
    over, noise = tf.constant([np.nextafter(np.float32(127), np.float32(128))]), tf.constant([0.4999998])
    assert int(round_to_uint8(over, -127, 127, noise)[0]) == 254
    assert int(round_to_uint8(-over, -127, 127, -noise)[0]) == 0
