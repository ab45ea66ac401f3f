"""Quantization: encodes each element in a few bits, with a scale per block, or as a vote with its sign."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.gradients.compression.arguments import validate_flag, validate_integer, validate_positive
from tfdist.gradients.compression.bit_packing import pack_bits, unpack_bits
from tfdist.gradients.compression.codec import Blockwise, Codec
from tfdist.gradients.compression.random_draws import divide_or_zero, round_to_uint8
from tfdist.gradients.compression.reducers import CodecReducer
from tfdist.gradients.compression.sparse_vector import peaks, sums
from tfdist.gradients.reducer import ReductionResult, Tensors


class _Levels(Blockwise):
    """Rounds each element to a multiple of 1 / `levels` of the scale of its block, at random if the codec is randomized."""

    levels: int

    def scale(self, rows: tf.Tensor) -> tf.Tensor:
        """Returns the scales [m] of blocks [m, k] float32; by default, the largest magnitudes."""
        return peaks(rows)

    def encode_rows(self, rows: tf.Tensor, noise: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        scales = self.scale(rows)
        multiples = divide_or_zero(rows, scales[:, None]) * self.levels
        return scales, round_to_uint8(multiples, -self.levels, self.levels, noise)

    def decode_elements(self, numbers: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
        return (tf.cast(numbers, tf.float32) - self.levels) * (1 / self.levels) * scales


class Int8(_Levels):
    """Rounds each element to one of 2^bits - 1 levels, symmetric about 0, between the bounds of its block.

        C(x)_i = s round(L x_i / s) / L,   s = max |x| of the block,   L = 2^(bits-1) - 1

        |C(x)_i - x_i| <= s / 2L;  with `stochastic`, at most s / L, and E C(x) = x

    Rounding to the nearest is biased, though only slightly at 8 bits: error feedback is on by default, and off with
    `stochastic`. At 8 bits a sum may be encoded again, so reduce-scatter can be used.

    Cost: bits n / 8 bytes and 4 per block: at 8 bits and blocks of 256 elements 1.016 n, which each replica receives from
    N - 1 others, or, as a reduce-scatter, 2.031 n (N - 1) / N.

    Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2016 (arXiv:1511.04561); Gupta et al., Deep
    Learning with Limited Numerical Precision, 2015 (arXiv:1502.02551), for stochastic rounding.
    """

    def __init__(self, *, bits: int = 8, block: int = 256, stochastic: bool = False):
        """Validates and stores the parameters.

        Args:
          bits: bits per element, 2 to 8.
          block: elements that share a scale, a multiple of 8.
          stochastic: whether to round up or down at random, which makes the result unbiased.
        """
        super().__init__("int8", block)
        self.bits = validate_integer("int8", "bits", bits, 2, 8)
        self.levels = 2 ** (self.bits - 1) - 1
        self.randomized = validate_flag("int8", "stochastic", stochastic)
        self.biased = not stochastic
        self.recodes = bits == 8


class QSGD(_Levels):
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
        self.levels = validate_integer("qsgd", "levels", levels, 1, 127)
        self.bits = (2 * levels).bit_length()

    def scale(self, rows: tf.Tensor) -> tf.Tensor:
        peak = peaks(rows)
        # Relative to the largest element, so squares neither overflow nor underflow.
        return peak * tf.sqrt(sums(tf.square(divide_or_zero(rows, peak[:, None]))))


class TernGrad(_Levels):
    """Rounds each element to -s, 0 or s, at random and unbiased.

        C(x)_i = s sign(x_i) b_i,   P(b_i = 1) = |x_i| / s,   s = max |x|

        E C(x) = x,   E |C(x) - x|^2 = s |x|_1 - |x|^2

    With `clip=c`, x is first clipped to c times its root mean square, which prevents a few large elements from adding
    noise to all others; the paper's 2.5 is a good value. Clipping adds a bias, so error feedback is on by default with
    clipping, and off without it.

    Cost: n / 4 + 4 bytes, which each replica receives from N - 1 others. `int8(bits=2, stochastic=True)` is the same
    with a scale per block.

    Wen et al., TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning, 2017
    (arXiv:1705.07878).
    """

    bits = 2
    levels = 1
    randomized = True

    def __init__(self, *, clip: float | None = None):
        """Sets `clip`, the factor c above 0; None for no clipping."""
        self._clip = None if clip is None else validate_positive("terngrad", "clip", clip)
        self.biased = clip is not None

    def scale(self, rows: tf.Tensor) -> tf.Tensor:
        peak = peaks(rows)
        if self._clip is None:
            return peak
        mean_square = sums(tf.square(divide_or_zero(rows, peak[:, None]))) / rows.shape[1]
        return peak * tf.minimum(self._clip * tf.sqrt(mean_square), 1.0)

    def block_shapes(self, size: int) -> list[tuple[int, int]]:
        """See base class. The whole vector is one block."""
        return [(1, size)]


class OneBit(Blockwise):
    """Sends the sign of each element and the mean magnitude of each block.

        C(x)_i = sign(x_i) |x|_1 / d,   |C(x) - x|^2 = |x|^2 - |x|_1^2 / d <= (1 - 1/d) |x|^2   for blocks of d elements

    Zeros and denormals count as positive. Seide et al. send two means per column, one of its positive and one of its
    negative elements. One mean per half-sized block costs the same bytes, and its error was no larger in our
    measurements. The method needs error feedback, which is on by default.

    Cost: n / 8 bytes and 4 per block: at blocks of 256 elements 0.141 n, which each replica receives from N - 1 others.

    Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed Training of Speech
    DNNs, 2014; Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, 2019
    (arXiv:1901.09847).
    """

    biased = True
    bits = 1

    def __init__(self, *, block: int = 256):
        """Sets `block`, the number of elements that share a magnitude; a multiple of 8."""
        super().__init__("onebit", block)

    def encode_rows(self, rows: tf.Tensor, noise: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        return sums(tf.abs(rows) * (1 / rows.shape[1])), tf.cast(rows < 0, tf.uint8)

    def decode_elements(self, numbers: tf.Tensor, scales: tf.Tensor) -> tf.Tensor:
        return tf.where(numbers == 1, -scales, scales)


class SignSGD(CodecReducer):
    """Each replica votes with the sign of its element; the total is the sign of the majority, not an estimate of a sum.

        total_i = sign(sum over replicas of v_i),   v_i = sign(x_i),   sent_i = total_i / N

    Totals are therefore -1, 0 (a tie) and 1 for gradients of any size, and the update is learning rate times sign: use
    `sgd` with a learning rate as for Adam, 1e-4 to 1e-3, as in the paper. Totals do not scale with the loss, and clipping
    by norm only rescales the learning rate. Tensors that are summed exactly keep their size.

    One bit cannot represent zero: all zeros of a replica vote for the same sign, which is redrawn for each step and
    tensor, so elements without a gradient do not drift.

    The difference between `sent` and the tensors is not an error that could be sent later, so error feedback is useless,
    and off by default.

    Cost: n / 8 bytes, which each replica receives from N - 1 others. Experimental: it trains, but less well than a sum.

    Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, 2018 (arXiv:1802.04434), and signSGD
    with Majority Vote is Communication Efficient and Fault Tolerant, 2019 (arXiv:1810.05291).
    """

    def __init__(self) -> None:
        super().__init__(_Votes())

    def reduce(self, tensors: Tensors, state: Tensors, collectives: Collectives, *, name: str) -> ReductionResult:
        """See base class. All replicas contribute equal parts of the total."""
        reduction = super().reduce(tensors, state, collectives, name=name)
        return reduction._replace(sent=[total / collectives.size for total in reduction.totals])


class _Votes(Codec):
    """Encodes signs; the sum of codes is the sign of the majority."""

    biased = False  # see SignSGD: the omitted part is not an error
    randomized = True
    experimental = True

    def encode(self, x: tf.Tensor, seed: tf.Tensor) -> list[tf.Tensor]:
        coin = seed[0] < 0
        return [pack_bits(tf.cast((x < 0) | ((x == 0) & coin), tf.uint8), 1)]

    def decode(self, code: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        return self.sum([part[None] for part in code], size)

    def sum(self, codes: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        replicas = codes[0].shape[0]
        rank_pieces = [unpack_bits(codes[0][rank], size, 1) for rank in range(replicas)]
        votes = [tf.add_n([tf.cast(piece, tf.int32) for piece in pieces]) for pieces in zip(*rank_pieces, strict=True)]
        return tf.concat(
            [tf.cast(tf.sign(replicas - 2 * negative_votes), tf.float32) for negative_votes in votes], axis=0
        )
