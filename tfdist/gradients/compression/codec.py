"""The contract `Codec`: encodes a vector in fewer bytes, and decodes it."""

import abc
from collections.abc import Sequence

import tensorflow as tf

from tfdist.gradients.compression.kernels.row_reductions import peaks


class Codec(abc.ABC):
    """Encodes a float32 vector in fewer bytes. Immutable; parameters are validated in the constructor.

    `encode` and `decode` are pure functions of tensors. The code of one replica is sent to all others, which decode it:
    codes are never summed. `AllGatherReducer` makes a codec a reducer. A method whose values another codec can encode
    (sparse values, the factors of a matrix) has a method `then(codec)`, which returns the combination.

    Attributes:
      biased: whether the expected value of decode(encode(x)) differs from x; error feedback is then on by default.
      randomized: whether `encode` uses its seed.
      recodes: whether a sum may be encoded again, so that it can be computed by reduce-scatter (two small errors
        instead of one).
      compiles: whether XLA makes `encode` and `decode` faster.
      experimental: whether it has yet to be shown both to train well and to save time on some link.
    """

    biased: bool
    randomized: bool = False
    recodes: bool = False
    compiles: bool = True
    experimental: bool = False

    @abc.abstractmethod
    def encode(self, x: tf.Tensor, seed: tf.Tensor) -> list[tf.Tensor]:
        """Encodes a vector.

        Args:
          x: [n] float32, n static and at least 1.
          seed: [2] int32, for stateless random operations; different for each step, tensor and replica.

        Returns:
          Tensors of rank 1 or more, of static shapes that depend only on n, and of any dtypes that `tf.bitcast`
          accepts.
        """

    @abc.abstractmethod
    def decode(self, code: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        """Returns the vector [size] float32 that a code represents."""

    def check(self, x: tf.Tensor, code: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns a scalar float32 that is finite if and only if x and the decoded x are; 4 bytes sent with the code.

        Args:
          x: as for `encode`.
          code: result of `encode`. A codec that notices inf and NaN while encoding can save a pass over x.
        """
        return peaks(x[None])[0]

    def sum(self, codes: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        """Returns the sum [size] float32 of several replicas' vectors, in the order of ranks.

        Args:
          codes: results of `encode`, each with a first dim of replicas.
          size: length of the vectors.
        """
        replicas = codes[0].shape[0]
        total = self.decode([part[0] for part in codes], size)
        for rank in range(1, replicas):
            total += self.decode([part[rank] for part in codes], size)
        return total

    @abc.abstractmethod
    def payload_bytes(self, size: int) -> int:
        """Returns the bytes of the code of a vector of this length."""
