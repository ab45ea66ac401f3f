"""The contract `Codec`: one vector in fewer bytes, and back."""

import abc
from collections.abc import Sequence

import tensorflow as tf

from tfdist.gradients.compression.folds import peaks


class Codec(abc.ABC):
    """Codes a vector of float32 in fewer bytes. A value: its parameters are checked when it is made.

    `encode` and `decode` are pure functions of tensors. The code of one replica travels to all others, who decode it:
    codes are never summed. `Coded` makes a reducer of a codec. A method whose values another codec may code (sparse values, the
    factors of a matrix) has a method `then(codec)`, which returns the two as one.

    Attributes:
      biased: whether decode(encode(x)) is not x on average; error feedback is then on by default.
      randomized: whether `encode` uses its seed.
      recodes: whether a sum may be coded once more, so that it can be made in shares (two small errors, not one).
      compiles: whether XLA makes `encode` and `decode` faster.
      experimental: whether it has not been shown both to learn and to win time on some link.
    """

    biased: bool
    randomized: bool = False
    recodes: bool = False
    compiles: bool = True
    experimental: bool = False

    @abc.abstractmethod
    def encode(self, x: tf.Tensor, seed: tf.Tensor) -> list[tf.Tensor]:
        """Codes a vector.

        Args:
          x: [n] float32, n static and at least 1.
          seed: [2] int32, for stateless random operations; another one for each step, tensor and replica.

        Returns:
          Tensors of rank 1 or more, of static shapes that depend on n alone, of any dtypes that `tf.bitcast` takes.
        """

    @abc.abstractmethod
    def decode(self, code: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        """Returns the vector [size] float32 that a code stands for."""

    def check(self, x: tf.Tensor, code: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns a scalar float32, finite if and only if x is, and what its code stands for; 4 bytes that travel along.

        Args:
          x: as for `encode`.
          code: what `encode` returned for it. A codec that has seen inf and NaN on its way may spare a pass over x.
        """
        return peaks(x[None])[0]

    def sum(self, codes: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        """Returns the sum [size] float32 of several replicas' vectors, in the order of ranks.

        Args:
          codes: as `encode` returned them, with the replicas as a first dim of each.
          size: length of the vectors.
        """
        replicas = codes[0].shape[0]
        total = self.decode([part[0] for part in codes], size)
        for rank in range(1, replicas):
            total += self.decode([part[rank] for part in codes], size)
        return total

    @abc.abstractmethod
    def payload_bytes(self, size: int) -> int:
        """Bytes of the code of a vector of this length."""
