"""Moments of the random numbers, and independence of seeds."""

import numpy as np
import tensorflow as tf

from tfdist.gradients.compression.all_gather_reducer import seed_of
from tfdist.gradients.compression.kernels.counter_rng import folded_in, rounding_noise

SIZE = 100_000
SEED = tf.constant([3, 4])


def test_it_is_uniform_in_the_open_interval():
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
    for other in (seed_of("a", 1, 0), seed_of("a", 0, 1), seed_of("b", 0, 0), folded_in(seed_of("a", 0, 0), 0)):
        second = rounding_noise(other, SIZE)
        assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(SIZE)


def test_it_continues_where_it_is_asked_to():
    whole = rounding_noise(SEED, 100)
    np.testing.assert_array_equal(rounding_noise(SEED, 60, 40), whole[40:])


def test_seeds_differ_and_repeat():
    draws = [(name, draws, rank) for name in ("a", "b") for draws in range(20) for rank in range(20)]
    seeds = {tuple(seed_of(*each).numpy()) for each in draws}
    assert len(seeds) == len(draws)
    assert tuple(seed_of("a", tf.constant(3), tf.constant(5)).numpy()) == tuple(seed_of("a", 3, 5).numpy())
    assert seed_of("a", 2**31 - 1, 0).dtype == tf.int32
