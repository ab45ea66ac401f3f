import fractions

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st

from tfdist.data import shuffle

GOLDEN = [[6, 9, 5, 4, 7, 3, 0, 2, 1, 8], [6, 3, 8, 9, 5, 0, 7, 1, 4, 2]]


def epoch(number: int, size: int, seed: int = 0) -> np.ndarray:
    return shuffle.indices(tf.range(number * size, (number + 1) * size, dtype=tf.int64), size, seed).numpy()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 16, 17, 100, 1797])
@pytest.mark.parametrize("number", [0, 1, 1000])
def test_each_epoch_is_a_permutation(size, number):
    np.testing.assert_array_equal(np.sort(epoch(number, size)), np.arange(size))


@hypothesis.given(
    size=st.integers(1, 20),
    start=st.integers(0, 100),
    count=st.integers(1, 70),
    seed=st.integers(-(2**63), 2**64),
)
@hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
def test_positions_are_independent_of_what_is_asked_with_them(size, start, count, seed):
    together = shuffle.indices(tf.range(start, start + count, dtype=tf.int64), size, seed).numpy()
    for place in {0, count // 2, count - 1}:
        alone = shuffle.indices(tf.constant([start + place], tf.int64), size, seed).numpy()
        assert alone == together[place : place + 1]


def test_order_is_the_same_in_every_process_and_version():
    # Golden values: if they change, runs saved by earlier versions no longer resume correctly.
    np.testing.assert_array_equal(epoch(0, 10, seed=7), GOLDEN[0])
    np.testing.assert_array_equal(epoch(1, 10, seed=7), GOLDEN[1])


def dependence(a: np.ndarray, b: np.ndarray, size: int) -> float:
    """Returns how far pairs of examples are from independence, in standard deviations of chi-square."""
    counts = np.bincount(a * 16 // size * 16 + b * 16 // size, minlength=256)
    return (np.sum((counts - len(a) / 256) ** 2) / (len(a) / 256) - 255) / np.sqrt(510)


@pytest.mark.parametrize("size", [60000, 2**24])
def test_neighbours_epochs_and_seeds_are_independent(size):
    # With 4 rounds of the cipher this is 40 to 4000; with 8, it is 44 at 2**24.
    def part(epoch_number, seed):
        start = epoch_number * size
        return shuffle.indices(tf.range(start, start + min(size, 2**20), dtype=tf.int64), size, seed).numpy()

    first = part(0, 5)
    for lag in (1, 2, 3, 8, 64):
        assert dependence(first[:-lag], first[lag:], size) < 6
    for other in (part(1, 5), part(0, 6)):
        assert dependence(first, other, size) < 6


def test_tensorflows_own_index_shuffle_is_not_random_enough():
    # The reason for using the raw operation with more rounds; if this fails, the public function may suffice.
    positions = tf.range(60000, dtype=tf.int64)
    first, second = (
        tf.random.experimental.index_shuffle(positions, seed=[7, number], max_index=59999).numpy() for number in (0, 1)
    )
    assert np.corrcoef(first, second)[0, 1] > 0.5


def test_small_permutations_do_not_repeat_after_256_epochs():
    assert len({tuple(epoch(number, 12)) for number in range(300)}) > 297


def test_every_place_gets_every_example_equally_often():
    size, epochs = 6, 400
    stream = shuffle.indices(tf.range(size * epochs, dtype=tf.int64), size, 3).numpy().reshape(epochs, size)
    for place in range(size):
        counts = np.bincount(stream[:, place], minlength=size)
        assert abs(counts - epochs / size).max() < 4 * np.sqrt(epochs / size)


def test_span_bounds_positions_whose_number_is_not_static():
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def function(positions):
        return shuffle.indices(positions, 3, 0, span=7)

    positions = tf.range(4, 11, dtype=tf.int64)
    np.testing.assert_array_equal(function(positions), shuffle.indices(positions, 3, 0))
    with pytest.raises(ValueError, match="span"):
        tf.function(lambda p: shuffle.indices(p, 3, 0), input_signature=function.input_signature)(positions)


@pytest.mark.parametrize(
    ("epochs", "size", "batch_size", "steps"),
    [(1, 10, 5, 2), (1, 10, 4, 3), (3, 10, 4, 8), (0, 10, 4, 0), (1, 3, 10, 1), (0.1, 1000, 100, 1), (0.5, 10, 5, 1)],
)
def test_steps_in_epochs(epochs, size, batch_size, steps):
    assert shuffle.steps_in_epochs(epochs, size, batch_size) == steps


def test_many_epochs_are_exact():
    assert shuffle.steps_in_epochs(10**6, 10**9 + 1, 7) == -(-fractions.Fraction(10**6 * (10**9 + 1), 7) // 1)
