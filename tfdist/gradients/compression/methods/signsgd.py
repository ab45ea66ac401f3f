"""SignSGD with majority vote."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.gradients.compression.bit_packing import pack_bits, packed_length, unpack_bits
from tfdist.gradients.compression.codec import Codec
from tfdist.gradients.compression.reducers import AllGatherReducer
from tfdist.gradients.reducer import ReductionResult


class SignSGD(AllGatherReducer):
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

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> ReductionResult:
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

    def payload_bytes(self, size: int) -> int:
        return packed_length(size, 1)
