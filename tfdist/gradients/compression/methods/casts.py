"""Casts to 2 bytes, summed in float32."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.gradients.compression.codec import Codec
from tfdist.gradients.compression.sparse_vector import peaks


class _Cast(Codec):
    """Sends each element in a 2-byte dtype, rounded to the nearest, ties to even. Sums in float32."""

    # The rounding error is relative to each element: small ones are not lost, as they are with a common scale.
    biased = False
    recodes = True
    dtype: tf.DType

    def encode(self, x: tf.Tensor, seed: tf.Tensor) -> list[tf.Tensor]:
        return [tf.cast(x, self.dtype)]

    def decode(self, code: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        return tf.cast(code[0], tf.float32)

    def check(self, x: tf.Tensor, code: Sequence[tf.Tensor]) -> tf.Tensor:
        """See base class. A value that the cast turns into inf counts as not finite."""
        return tf.cast(tf.cast(peaks(x[None])[0], self.dtype), tf.float32)


class FP16(_Cast):
    """IEEE half precision: 11 significant bits, magnitudes from 6e-8 to 65504.

        C(x)_i = fp16(x_i);   |C(x)_i - x_i| <= 2^-11 |x_i| for |x_i| in [2^-14, 65504], and at most 2^-25 below

    **A value above 65504 becomes inf, and the step then counts as not finite on every replica**: it is skipped, like a
    step with NaN. Values below 3e-8 become 0. If either happens, use `bf16`, or a loss scale that moves the gradients
    into the range.

    Cost: 2 n bytes, which each replica receives from N - 1 others, or, as a reduce-scatter, 4 n (N - 1) / N.

    Micikevicius et al., Mixed Precision Training, 2018 (arXiv:1710.03740).
    """

    dtype = tf.float16


class BF16(_Cast):
    """The upper half of float32: 8 significant bits, the full range of magnitudes.

        C(x)_i = bf16(x_i);   |C(x)_i - x_i| <= 2^-8 |x_i|

    Cost: 2 n bytes, which each replica receives from N - 1 others, or, as a reduce-scatter, 4 n (N - 1) / N.

    Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019 (arXiv:1905.12322).
    """

    dtype = tf.bfloat16
