"""SignSGD with majority vote."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.gradients.compression.bit_packing import pack_bits, packed_length, unpack_bits
from tfdist.gradients.compression.codec import Codec
from tfdist.gradients.compression.reducers import AllGatherReducer
from tfdist.gradients.reducer import Reduced


class SignSGD(AllGatherReducer):
    """Each replica votes with the sign of its element; the total is the sign of the majority, not an estimate of a sum.

        total_i = sign(sum over replicas of v_i),   v_i = sign(x_i),   sent_i = total_i / N

    So totals are -1, 0 (a tie) and 1 whatever the size of the gradients, and the update is learning rate times sign: as
    in the paper, with `sgd` and a learning rate as for Adam, 1e-4 to 1e-3. They do not scale with the loss, and
    clipping by norm only rescales the learning rate. Tensors that are summed exactly keep their own size.

    One bit cannot represent zero: all zeros of a replica vote for the same sign, drawn anew for each step and tensor,
    so that elements without a gradient do not drift.

    What `sent` leaves out is not an error that could be sent later, so error feedback is off by default and useless.

    Cost: n / 8 bytes, which each replica receives from N - 1 others. Experimental: it trains, but less well than a sum.

    Bernstein et al., signSGD: Compressed Optimisation for Non-Convex Problems, 2018 (arXiv:1802.04434), and signSGD
    with Majority Vote is Communication Efficient and Fault Tolerant, 2019 (arXiv:1810.05291).
    """

    def __init__(self) -> None:
        """Initializes the method, which has no parameters."""
        super().__init__(_Votes())

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> Reduced:
        """See base class; each replica's contribution to a majority is an equal part of it."""
        reduced = super().reduce(tensors, state, collectives, name=name)
        return reduced._replace(sent=[total / collectives.size for total in reduced.totals])


class _Votes(Codec):
    """Encodes signs; the sum of codes is the sign of the majority."""

    biased = False  # see SignSGD: what is left out is not an error
    randomized = True
    experimental = True

    def encode(self, x: tf.Tensor, seed: tf.Tensor) -> list[tf.Tensor]:
        coin = seed[0] < 0
        return [pack_bits(tf.cast((x < 0) | ((x == 0) & coin), tf.uint8), 1)]

    def decode(self, code: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        return self.sum([part[None] for part in code], size)

    def sum(self, codes: Sequence[tf.Tensor], size: int) -> tf.Tensor:
        replicas = codes[0].shape[0]
        pieces_of_ranks = [unpack_bits(codes[0][rank], size, 1) for rank in range(replicas)]
        votes = [
            tf.add_n([tf.cast(piece, tf.int32) for piece in pieces]) for pieces in zip(*pieces_of_ranks, strict=True)
        ]
        return tf.concat([tf.cast(tf.sign(replicas - 2 * against), tf.float32) for against in votes], axis=0)

    def payload_bytes(self, size: int) -> int:
        return packed_length(size, 1)
