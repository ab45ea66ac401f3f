"""From a codec to a reducer, in shares: each replica sums one share of the vector and codes the sum for the others.

all-to-all of the coded shares, decode and sum in float32, code the sum, all-gather. With c bytes of code this sends
2 c (N - 1) / N, as a ring all-reduce does, where sending each code to all costs c (N - 1). The price is a second coding
error; it counts as the sender's who made it, so nothing is lost to error feedback.
"""

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.gradients.compression.coded import AllGatherReducer, like
from tfdist.gradients.compression.noise import folded_in

# So many elements of float32 are what TensorFlow takes a slice of without a copy.
_GRAIN = 16


class ReduceScatterReducer(AllGatherReducer):
    """Sums vectors in shares, where that sends less: with more than 2 replicas and an engine that exchanges shares."""

    def _sum(
        self, tensor: tf.Tensor, seed: tf.Tensor, collectives: Collectives, name: str
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        replicas, wire, coder = collectives.size, collectives.wire, self._coder
        if replicas <= 2 or not wire.exchanges:
            return super()._sum(tensor, seed, collectives, name)
        size = tensor.shape.num_elements()
        share = -(-size // (replicas * _GRAIN)) * _GRAIN
        shares = tf.reshape(_padded(tf.reshape(tf.cast(tensor, tf.float32), [-1]), replicas * share), [replicas, share])
        packed = [coder.encode(shares[rank], folded_in(seed, rank), wire) for rank in range(replicas)]
        [received] = collectives.all_to_all([tf.concat(packed, axis=0)], name=f"{name}/shares")
        total, checks = coder.sum(received, replicas, share, wire)
        total *= tf.where(tf.reduce_all(tf.math.is_finite(checks)), 1.0, float("nan"))  # the second check must see it
        summed = coder.encode(total, folded_in(seed, replicas), wire)
        [gathered] = collectives.all_gather([summed], name=f"{name}/sums")
        sums = tf.reshape(gathered, [replicas, -1])
        totals, checks = zip(*(coder.decode(sums[rank], share, wire) for rank in range(replicas)), strict=True)
        second_error = coder.decode(summed, share, wire)[0] - total
        owner = tf.one_hot(collectives.rank, replicas, dtype=tf.float32)
        sent = [coder.decode(packed[rank], share, wire)[0] + owner[rank] * second_error for rank in range(replicas)]
        whole = [tf.concat(parts, axis=0)[:size] for parts in (totals, sent)]
        return like(whole[0], tensor), like(whole[1], tensor), tf.concat(checks, axis=0)


def _padded(vector: tf.Tensor, length: int) -> tf.Tensor:
    return tf.pad(vector, [[0, length - vector.shape[0]]]) if length > vector.shape[0] else vector
