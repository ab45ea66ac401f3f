"""Quantization to integers of 2 to 8 bits with a scale per block."""

import tensorflow as tf

from tfdist.gradients.compression.arguments import validate_flag, validate_integer
from tfdist.gradients.compression.codec import Blockwise, Noise
from tfdist.gradients.compression.random_draws import divide_or_zero, round_to_uint8
from tfdist.gradients.compression.sparse_vector import bounds, peaks


class Int8(Blockwise):
    """Rounds each element to one of about 2^bits levels between the bounds of its block.

        symmetric:  C(x)_i = s round(L x_i / s) / L,   s = max |x| of the block,   L = 2^(bits-1) - 1
        min-max:    C(x)_i = a + (b - a) round(L (x_i - a) / (b - a)) / L,   [a, b] the block's range,   L = 2^bits - 1

        |C(x)_i - x_i| <= s / 2L, or (b - a) / 2L;  with `stochastic` twice that, and E C(x) = x

    Min-max halves the step size for blocks whose values are not centered at 0. Gradients are centered: for them, min-max
    takes longer, and zeros do not stay zero. Rounding to the nearest is biased, though only slightly at 8 bits: error
    feedback is on by default, and off with `stochastic`. At 8 bits a sum may be encoded again, so reduce-scatter can be
    used.

    Cost: bits n / 8 bytes and 4 per block (8 for min-max): at 8 bits and blocks of 256 elements 1.016 n, which each
    replica receives from N - 1 others, or, as a reduce-scatter, 2.031 n (N - 1) / N.

    Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2016 (arXiv:1511.04561); Gupta et al., Deep
    Learning with Limited Numerical Precision, 2015 (arXiv:1502.02551), for stochastic rounding.
    """

    def __init__(self, *, bits: int = 8, block: int = 256, symmetric: bool = True, stochastic: bool = False):
        """Validates and stores the parameters.

        Args:
          bits: bits per element, 2 to 8.
          block: elements that share a scale, a multiple of 8.
          symmetric: whether levels are symmetric about 0; otherwise min-max.
          stochastic: whether to round up or down at random, which makes the result unbiased.
        """
        super().__init__("int8", block)
        self.bits = validate_integer("int8", "bits", bits, 2, 8)
        self._symmetric = validate_flag("int8", "symmetric", symmetric)
        self.randomized = validate_flag("int8", "stochastic", stochastic)
        self.scales = 1 if symmetric else 2
        self.biased = not stochastic
        self.recodes = bits == 8

    def encode_rows(self, rows: tf.Tensor, noise: Noise) -> tuple[list[tf.Tensor], tf.Tensor]:
        rounding_noise = noise(rows.shape) if self.randomized else None
        if self._symmetric:
            levels, scale = 2 ** (self.bits - 1) - 1, peaks(rows)
            return [scale], round_to_uint8(
                divide_or_zero(rows, scale[:, None]) * levels, -levels, levels, rounding_noise
            )
        levels, (low, high) = 2**self.bits - 1, bounds(rows)
        # Halved, because the range of a block can be twice the largest float, which would be inf.
        offsets, width = 0.5 * rows - 0.5 * low[:, None], (0.5 * high - 0.5 * low)[:, None]
        return [low, high], round_to_uint8(divide_or_zero(offsets, width) * levels, 0, levels, rounding_noise)

    def decode_elements(self, numbers: tf.Tensor, *scales: tf.Tensor) -> tf.Tensor:
        """See base class. Decodes the bounds exactly."""
        integers = tf.cast(numbers, tf.float32)
        if self._symmetric:
            levels = 2 ** (self.bits - 1) - 1
            return (integers - levels) * (1 / levels) * scales[0]
        fraction = integers * (1 / (2**self.bits - 1))
        return (1.0 - fraction) * scales[0] + fraction * scales[1]
