"""TernGrad: -1, 0 or 1 times one magnitude."""

import math
from collections.abc import Sequence

import tensorflow as tf

from tfdist.errors import InputError
from tfdist.errors.numbers import is_number
from tfdist.gradients.compression.bit_packing import in_pieces, pack_bits, packed_length, unpack_bits
from tfdist.gradients.compression.codec import Codec
from tfdist.gradients.compression.random_draws import relative, rounded, rounding_noise
from tfdist.gradients.compression.sparse_vector import peaks, sums


class TernGrad(Codec):
    """Rounds each element to -s, 0 or s, at random and unbiased.

        C(x)_i = s sign(x_i) b_i,   P(b_i = 1) = |x_i| / s,   s = max |x|

        E C(x) = x,   E |C(x) - x|^2 = s |x|_1 - |x|^2

    With `clip=c`, x is first clipped to c times its root mean square, which keeps a few large elements from adding
    noise to all others: the paper's 2.5 is a good value. Clipping adds a bias, so error feedback is then on by default;
    without clipping it is off.

    Cost: n / 4 bytes and 4, which each replica receives from N - 1 others. `int8(bits=2, stochastic=True)` is the same
    with a scale per block.

    Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, 2017
    (arXiv:1705.07878).
    """

    randomized = True

    def __init__(self, *, clip: float | None = None):
        """Validates and stores the parameters.

        Args:
          clip: c, above 0; None for no clipping.
        """
        if clip is not None and (not is_number(clip) or not 0 < clip < math.inf):
            raise InputError(f"terngrad needs a finite clip above 0. Received: {clip!r}. Leave it out for no clipping.")
        self._clip = None if clip is None else float(clip)
        self.biased = clip is not None

    def encode(self, x: tf.Tensor, seed: tf.Tensor) -> list[tf.Tensor]:
        """See base class."""
        scale = largest = peaks(x[None])
        if self._clip is not None:
            mean_square = sums(tf.square(relative(x, largest))[None]) / x.shape[0]
            scale = largest * tf.minimum(self._clip * tf.sqrt(mean_square), 1.0)
        numbers = rounded(relative(x, scale), -1, 1, rounding_noise(seed, x.shape[0]))
        return [scale, pack_bits(numbers, 2)]

    def decode(self, code: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        """See base class."""
        return tf.concat(self._pieces(code, size), axis=0)

    def sum(self, codes: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        """See base class."""
        replicas = codes[0].shape[0]
        each = [self._pieces([part[rank] for part in codes], size) for rank in range(replicas)]
        return tf.concat([tf.add_n(pieces) for pieces in zip(*each, strict=True)], axis=0)

    def payload_bytes(self, size: int) -> int:
        """See base class."""
        return 4 + packed_length(size, 2)

    def _pieces(self, code: Sequence[tf.Tensor], size: int) -> list[tf.Tensor]:
        scale, packed = code
        return in_pieces(lambda numbers: (tf.cast(numbers, tf.float32) - 1.0) * scale, unpack_bits(packed, size, 2))
