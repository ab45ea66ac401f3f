"""QSGD: stochastic rounding relative to a norm."""

import tensorflow as tf

from tfdist.gradients.compression.arguments import validate_integer
from tfdist.gradients.compression.codec import Blockwise, Noise
from tfdist.gradients.compression.random_draws import divide_or_zero, round_to_uint8
from tfdist.gradients.compression.sparse_vector import peaks, sums


class QSGD(Blockwise):
    """Rounds |x_i| / |x|_2 up or down to a multiple of 1 / s, at random and unbiased.

        C(x)_i = |x|_2 sign(x_i) l_i / s,   l_i = floor(s |x_i| / |x|_2 + u_i),   u_i uniform in [0, 1)

        E C(x) = x,   E |C(x) - x|^2 <= min(d / s^2, sqrt(d) / s) |x|^2   for each block of d elements

    Unbiased, so error feedback is off by default.

    Cost: ceil(log2(2 s + 1)) n / 8 bytes and 4 per block, which each replica receives from N - 1 others. The integers
    are packed to fixed widths, not by the paper's Elias code, whose length would depend on the values.

    Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, 2017 (arXiv:1610.02132).
    """

    biased = False
    randomized = True

    def __init__(self, *, levels: int = 15, block: int = 128):
        """Validates and stores the parameters.

        Args:
          levels: s, 1 to 127.
          block: d, a multiple of 8.
        """
        super().__init__("qsgd", block)
        self._levels = validate_integer("qsgd", "levels", levels, 1, 127)
        self.bits = (2 * levels).bit_length()

    def encode_rows(self, rows: tf.Tensor, noise: Noise) -> tuple[list[tf.Tensor], tf.Tensor]:
        peak = peaks(rows)
        # Relative to the largest element, so squares neither overflow nor underflow.
        norm = peak * tf.sqrt(sums(tf.square(divide_or_zero(rows, peak[:, None]))))
        y = divide_or_zero(rows, norm[:, None]) * self._levels
        return [norm], round_to_uint8(y, -self._levels, self._levels, noise(rows.shape))

    def decode_elements(self, numbers: tf.Tensor, *scales: tf.Tensor) -> tf.Tensor:
        return (tf.cast(numbers, tf.float32) - self._levels) * (1 / self._levels) * scales[0]
