"""The order of examples: concatenated permutations of epochs, as a pure function of a position, without state.

Position p of the stream is index p % size of epoch p // size. Step k of a run with a global batch of B examples uses
positions k * B to (k + 1) * B - 1; see `tfdist.data.stream_position` for a run whose batch size changes.
"""

import fractions
import math

import tensorflow as tf

# The public `tf.random.experimental.index_shuffle` has 4 rounds of the same cipher. With 4, the permutations of 60000
# under adjacent seeds have a correlation of 0.9; with 8, those of 2**24 are still distinguishable from random ones.
_ROUNDS = 12
_PHILOX = 1
_WORDS_PER_BLOCK = 4


def indices(positions: tf.Tensor, size: int, seed: int, span: int | None = None) -> tf.Tensor:
    """Returns the indices of the examples at consecutive positions of the stream.

    Each epoch has its own permutation, drawn from (seed, epoch), which is never stored: an index costs about max(1,
    2**16 / size) evaluations of a cipher, some 20 ns each.

    Args:
      positions: int64 [n], n > 0, consecutive and ascending.
      size: examples per epoch, at least 1.
      seed: any integer; seeds that are equal modulo 2**64 give equal orders.
      span: upper bound of n if n is not static.

    Returns:
      int64 [n], in [0, size).
    """
    epochs = positions // size
    first = epochs[0]
    longest = positions.shape[0] or span
    if longest is None:
        raise ValueError("The number of positions must be static, or bounded by `span`. Received: neither.")
    keys = tf.gather(_epoch_keys(first, _epochs_spanned(longest, size), seed), epochs - first)
    return tf.raw_ops.RandomIndexShuffle(
        index=positions % size, seed=keys, max_index=tf.constant(size - 1, tf.int64), rounds=_ROUNDS
    )


def steps_in_epochs(epochs: float, size: int, batch_size: int) -> int:
    """Returns the number of steps that use every example of these epochs; the last may reach into the next epoch.

    Args:
      epochs: passes over the data, at least 0; may be fractional.
      size: examples per epoch.
      batch_size: global batch size.
    """
    return math.ceil(fractions.Fraction(str(epochs)) * size / batch_size)


def _epochs_spanned(positions: int, size: int) -> int:
    """Returns the maximum number of epochs that this many consecutive positions span."""
    return (positions + size - 2) // size + 1


def _epoch_keys(first: tf.Tensor, count: int, seed: int) -> tf.Tensor:
    """Returns three random words for each epoch from `first` on: Philox's block `epoch` under the key `seed`.

    The cipher uses only the low bits of its key if the permutation is small, so keys that merely count would repeat
    after 256 epochs.
    """
    blocks = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[count, _WORDS_PER_BLOCK],
        key=tf.constant([seed % 2**64], tf.uint64),
        counter=tf.stack([tf.cast(first, tf.uint64), tf.constant(0, tf.uint64)]),
        alg=tf.constant(_PHILOX),
        dtype=tf.uint32,
    )
    return blocks[:, :3]
