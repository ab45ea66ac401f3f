"""The reduce-scatter reducer: each replica sums one share of the vector and encodes the sum for the others.

All-to-all of the encoded shares, decode and sum in float32, encode the sum, all-gather. With a code of c bytes this
sends 2 c (N - 1) / N, like a ring all-reduce, whereas sending each code to all costs c (N - 1). The price is a second
coding error; it is attributed to the replica that made it, so error feedback loses nothing.
"""

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.gradients.compression.all_gather_reducer import AllGatherReducer, like
from tfdist.gradients.compression.kernels.counter_rng import folded_in

# TensorFlow takes slices at multiples of this many float32 elements without a copy.
_GRAIN = 16


class ReduceScatterReducer(AllGatherReducer):
    """Sums vectors by reduce-scatter where that sends less: over 2 replicas and an engine with a native all-to-all."""

    def _sum(
        self, tensor: tf.Tensor, seed: tf.Tensor, collectives: Collectives, name: str
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        replicas, wire, coder = collectives.size, collectives.wire, self._coder
        if replicas <= 2 or not wire.native_all_to_all:
            return super()._sum(tensor, seed, collectives, name)
        size = tensor.shape.num_elements()
        share = -(-size // (replicas * _GRAIN)) * _GRAIN
        shares = tf.reshape(_padded(tf.reshape(tf.cast(tensor, tf.float32), [-1]), replicas * share), [replicas, share])
        packed = [coder.encode(shares[rank], folded_in(seed, rank), wire) for rank in range(replicas)]
        [received] = collectives.all_to_all([tf.concat(packed, axis=0)], name=f"{name}/shares")
        total, checks = coder.sum(received, replicas, share, wire)
        # NaN, so that the check of the second encoding sees it.
        total *= tf.where(tf.reduce_all(tf.math.is_finite(checks)), 1.0, float("nan"))
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
