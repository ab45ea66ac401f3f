"""The `Codec` interface, which encodes a vector in fewer bytes and decodes it, and codecs with a scale per block."""

import abc
import functools
import math
import operator
from collections.abc import Sequence

import tensorflow as tf

from tfdist.gradients.compression.arguments import validate_integer
from tfdist.gradients.compression.bit_packing import pack_bits, unpack_bits
from tfdist.gradients.compression.random_draws import rounding_noise
from tfdist.gradients.compression.sparse_vector import peaks


class Codec(abc.ABC):
    """Encodes a float32 vector in fewer bytes. Immutable; parameters are validated in the constructor.

    `encode` and `decode` are pure functions of tensors. Each replica's code is sent to all others, which decode it;
    codes are never summed. `CodecReducer` turns a codec into a reducer. If another codec can encode the values
    that are sent, such as sparse values or factors of a matrix, `then(codec)` returns the combination.

    Attributes:
      biased: whether the expected value of decode(encode(x)) differs from x; error feedback is then on by default.
      randomized: whether `encode` uses its seed.
      recodes: whether a sum may be encoded again, as a reduce-scatter does (two small errors instead of one).
      compiles: whether XLA makes `encode` and `decode` faster.
      experimental: whether it has not yet been shown both to train well and to save time on any link.
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
        """Returns a scalar float32, sent with the code, that is finite if and only if x and the decoded x are.

        Args:
          x: as for `encode`.
          code: result of `encode`. A codec that detects inf and NaN while encoding can save a pass over x.
        """
        return peaks(x[None])[0]

    def sum(self, codes: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        """Returns the sum [size] float32 of several replicas' vectors, in the order of ranks.

        Args:
          codes: results of `encode`, with replicas as an additional first dim.
          size: length of the vectors.
        """
        replicas = range(codes[0].shape[0])
        return functools.reduce(operator.add, (self.decode([part[rank] for part in codes], size) for rank in replicas))


_MAX_BLOCK_SIZE = 2**20


class Blockwise(Codec):
    """Encodes each element in `bits` bits, with a scale per block of consecutive elements. The last block may be shorter."""

    bits: int

    def __init__(self, name: str, block: int):
        self._block = validate_integer(name, "block", block, 8, _MAX_BLOCK_SIZE, multiple=8)

    @abc.abstractmethod
    def encode_rows(self, rows: tf.Tensor, noise: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Encodes blocks [m, k] float32 as scales [m] float32 and numbers [m, k] uint8 below 2**bits.

        `noise` has the shape of the blocks and values in (-1/2, 1/2); it is None unless the codec is randomized.
        """

    @abc.abstractmethod
    def decode_elements(self, numbers: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
        """Decodes numbers [j] uint8 of any blocks, given the scale of each number's block, [j] float32."""

    def block_shapes(self, size: int) -> list[tuple[int, int]]:
        """Returns the shape of the full blocks, as rows, and of the remaining elements, as one row."""
        full_blocks, remainder = divmod(size, self._block)
        return [shape for shape in ((full_blocks, self._block), (1, remainder)) if math.prod(shape)]

    def encode(self, x: tf.Tensor, seed: tf.Tensor) -> list[tf.Tensor]:
        """See base class. Returns scales and packed numbers of the full blocks, then of the remaining elements."""
        code: list[tf.Tensor] = []
        start = 0
        for shape in self.block_shapes(x.shape[0]):
            size = math.prod(shape)
            noise = tf.reshape(rounding_noise(seed, size, start), shape) if self.randomized else None
            scales, numbers = self.encode_rows(tf.reshape(x[start : start + size], shape), noise)
            code += [scales, pack_bits(tf.reshape(numbers, [-1]), self.bits)]
            start += size
        return code

    def decode(self, code: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        return tf.concat(self._pieces(code, size), axis=0)

    def sum(self, codes: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        """See base class. Sums piece by piece, because XLA compiles each piece to one loop."""
        pieces = [self._pieces([part[rank] for part in codes], size) for rank in range(codes[0].shape[0])]
        return tf.concat([functools.reduce(operator.add, parts) for parts in zip(*pieces, strict=True)], axis=0)

    def check(self, x: tf.Tensor, code: Sequence[tf.Tensor]) -> tf.Tensor:
        """See base class. The scale of a block is finite if and only if the block is."""
        return tf.add_n([tf.reduce_sum(scales * 2.0**-40) for scales in code[::2]])

    def _pieces(self, code: Sequence[tf.Tensor], size: int) -> list[tf.Tensor]:
        pieces: list[tf.Tensor] = []
        for shape, scales, packed in zip(self.block_shapes(size), code[::2], code[1::2], strict=True):
            element_scales = tf.reshape(tf.broadcast_to(scales[:, None], shape), [-1])
            numbers = unpack_bits(packed, math.prod(shape), self.bits)
            pieces += map(self.decode_elements, numbers, tf.split(element_scales, [part.shape[0] for part in numbers]))
        return pieces
