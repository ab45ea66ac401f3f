"""Random numbers for each row of a batch, independent of the other rows."""

import dataclasses

import tensorflow as tf

_ROUNDS = 12  # as in tfdist.data.shuffle
_PHILOX = 1
_BITS = 53
_FRACTION_BITS = 24  # of a float32


@dataclasses.dataclass(frozen=True)
class RowRandom:
    """Random numbers that depend on (seed, stream, epoch, example) alone.

    Attributes:
      places: int64 [n], epoch * examples + example of each row, below 2**53.
      seed: any integer.
      stream: number of the independent stream, at least 0: each augmentation of a chain has its own.
    """

    places: tf.Tensor
    seed: int
    stream: int = 0

    def uniform(self, count: int) -> tf.Tensor:
        """Returns numbers in [0, 1), float32 [n, count]; the same in each call."""
        fractions = tf.bitwise.right_shift(self._words(count), tf.constant(_BITS - _FRACTION_BITS, tf.int64))
        return tf.cast(fractions, tf.float32) / 2**_FRACTION_BITS

    @property
    def seeds(self) -> tf.Tensor:
        """Seeds of each row for `tf.random.stateless_uniform` and the like, int32 [n, 2]."""
        return tf.cast(tf.bitwise.bitwise_and(self._words(2), tf.constant(2**31 - 1, tf.int64)), tf.int32)

    def _words(self, count: int) -> tf.Tensor:
        """Returns int64 [n, count] in [0, 2**53): the places under keyed permutations, one for each column."""
        keys = tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[count, 4],
            key=tf.constant([self.seed % 2**64], tf.uint64),
            # The second word separates the keys from those of the order of examples, whose second word is 0.
            counter=tf.constant([0, 1 + self.stream], tf.uint64),
            alg=tf.constant(_PHILOX),
            dtype=tf.uint32,
        )
        largest = tf.constant(2**_BITS - 1, tf.int64)
        columns = [
            tf.raw_ops.RandomIndexShuffle(index=self.places, seed=keys[column, :3], max_index=largest, rounds=_ROUNDS)
            for column in range(count)
        ]
        return tf.stack(columns, axis=1)
