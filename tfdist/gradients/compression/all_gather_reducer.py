"""The all-gather reducer: codes are gathered and decoded by every replica."""

import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.distribution.strategy import State
from tfdist.gradients.compression.codec import Codec
from tfdist.gradients.compression.kernels.codec_compiler import CodecCompiler
from tfdist.gradients.compression.kernels.counter_rng import folded_in
from tfdist.gradients.reducer import Reduced, Reducer


class AllGatherReducer(Reducer):
    """Sums vectors by sending each replica's code to all others: a code of c bytes costs c (N - 1) received by each.

    The code is sent in one message with 4 more bytes, a float that is finite if and only if the vector is.
    """

    def __init__(self, codec: Codec):
        """Initializes the reducer.

        Args:
          codec: encodes and decodes the vectors.
        """
        self._codec = codec
        self._coder = CodecCompiler(codec)
        self.biased = codec.biased
        self.experimental = codec.experimental

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """See base class: for a randomized codec, the number of calls, so that each draws different numbers."""
        if not self._codec.randomized:
            return []
        return [State(f"{spec.name}/draws", (), tf.int32, per_replica=False) for spec in specs]

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> Reduced:
        """See base class."""
        totals, sent, witnesses = list(tensors), list(tensors), []
        for i, tensor in enumerate(tensors):
            if tensor.shape.num_elements():
                message = f"{name}/{i}"
                draws = state[i] if self._codec.randomized else None
                totals[i], sent[i], checks = self._sum(
                    tensor, self._seed(message, draws, collectives), collectives, message
                )
                witnesses.append(checks)
        return Reduced(totals, sent, [draws + 1 for draws in state], witnesses)

    def _seed(self, name: str, draws: tf.Tensor | None, collectives: Collectives) -> tf.Tensor:
        return tf.zeros([2], tf.int32) if draws is None else seed_of(name, draws, collectives.rank)

    def _sum(
        self, tensor: tf.Tensor, seed: tf.Tensor, collectives: Collectives, name: str
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns the sum, this replica's contribution to it, and the checks of all replicas."""
        size, wire = tensor.shape.num_elements(), collectives.wire
        packed = self._coder.encode(tensor, seed, wire)
        [gathered] = collectives.all_gather([packed], name=name)
        total, checks = self._coder.sum(gathered, collectives.size, size, wire)
        own, _ = self._coder.decode(packed, size, wire)
        return like(total, tensor), like(own, tensor), checks


def like(vector: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Returns a vector in the shape and dtype of a tensor."""
    return tf.cast(tf.reshape(vector, tensor.shape), tensor.dtype)


def seed_of(name: str, draws: Any, rank: Any) -> tf.Tensor:
    """Returns a seed [2] int32 for stateless random operations, from a message name, a number of draws and a rank."""
    key = zlib.crc32(name.encode()) & 0x7FFFFFFF
    return folded_in(folded_in(tf.constant([key, key ^ 0x5BD1E995], tf.int32), draws), rank)
