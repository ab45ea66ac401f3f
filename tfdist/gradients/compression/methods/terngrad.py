"""TernGrad: -1, 0 or 1 times one magnitude."""

import math

import tensorflow as tf

from tfdist.errors import InputError
from tfdist.errors.formatting import is_number
from tfdist.gradients.compression.codec import Blockwise, Noise
from tfdist.gradients.compression.random_draws import divide_or_zero, round_to_uint8
from tfdist.gradients.compression.sparse_vector import peaks, sums


class TernGrad(Blockwise):
    """Rounds each element to -s, 0 or s, at random and unbiased.

        C(x)_i = s sign(x_i) b_i,   P(b_i = 1) = |x_i| / s,   s = max |x|

        E C(x) = x,   E |C(x) - x|^2 = s |x|_1 - |x|^2

    With `clip=c`, x is first clipped to c times its root mean square, which prevents a few large elements from adding
    noise to all others; the paper's 2.5 is a good value. Clipping adds a bias, so error feedback is on by default with
    clipping, and off without it.

    Cost: n / 4 bytes and 4, which each replica receives from N - 1 others. `int8(bits=2, stochastic=True)` is the same
    with a scale per block.

    Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, 2017
    (arXiv:1705.07878).
    """

    bits = 2
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

    def encode_rows(self, rows: tf.Tensor, noise: Noise) -> tuple[list[tf.Tensor], tf.Tensor]:
        scale = peak = peaks(rows)
        if self._clip is not None:
            mean_square = sums(tf.square(divide_or_zero(rows, peak[:, None]))) / rows.shape[1]
            scale = peak * tf.minimum(self._clip * tf.sqrt(mean_square), 1.0)
        return [scale], round_to_uint8(divide_or_zero(rows, scale[:, None]), -1, 1, noise(rows.shape))

    def decode_elements(self, numbers: tf.Tensor, *scales: tf.Tensor) -> tf.Tensor:
        return (tf.cast(numbers, tf.float32) - 1.0) * scales[0]

    def block_shapes(self, size: int) -> list[tuple[int, int]]:
        """See base class. The whole vector is one block."""
        return [(1, size)]
