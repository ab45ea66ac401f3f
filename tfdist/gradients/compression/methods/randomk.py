"""Random-k: all replicas draw the same elements, so only their values are all-reduced."""

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.gradients.compression.arguments import selection_size, validate_flag, validate_ratio
from tfdist.gradients.compression.reducers import Stochastic, finiteness_flag
from tfdist.gradients.compression.sparse_vector import to_dense


class RandomK(Stochastic):
    """Sends k random elements, k = max(1, round(ratio n)), the same on every replica.

        C(x)_i = x_i if i is drawn, else 0;   E |x - C(x)|^2 = (1 - k/n) |x|^2

    The vector is split into k parts of nearly equal length b, and one element of each is drawn: k distinct elements at
    the cost of k random numbers. The seed is derived from the message's name and a number of draws, so indices need not
    be sent.

    By default the values are sent unscaled and error feedback stores the others: over about n/k steps everything is
    sent. With `unbiased=True` each is multiplied by its b, so that E C(x) = x and no feedback is needed, but then E |x
    - C(x)|^2 = (n/k - 1) |x|^2: at ratio=0.01 a noise ten times as large as the gradient.

    Cost: 4 (k + 1) bytes, all-reduced (the 1 shows whether the tensor was finite, even where it is not drawn).
    Experimental: at the same cost it trains less well than methods that look at the gradient.

    Stich et al., Sparsified SGD with Memory, 2018 (arXiv:1809.07599); Konecny et al., Federated Learning: Strategies
    for Improving Communication Efficiency, 2016 (arXiv:1610.05492).
    """

    experimental = True

    def __init__(self, *, ratio: float, unbiased: bool = False):
        """Validates and stores the parameters.

        Args:
          ratio: k/n, in (0, 1].
          unbiased: whether C(x) is unbiased, see above.
        """
        self._ratio = validate_ratio("randomk", ratio)
        self._unbiased = validate_flag("randomk", "unbiased", unbiased)
        self.biased = not unbiased

    def reduce_with_seed(
        self, x: tf.Tensor, seed: tf.Tensor, collectives: Collectives, *, name: str
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        size = x.shape[0]
        k = selection_size(self._ratio, size)
        indices, lengths = draw_elements(k, size, seed)
        values = tf.gather(x, indices) * (tf.cast(lengths, tf.float32) if self._unbiased else 1.0)
        [total_message] = collectives.all_reduce([tf.concat([values, finiteness_flag(x)[None]], axis=0)], name=name)
        total, sent = (
            to_dense(indices[None], total_message[None, :k], size),
            to_dense(indices[None], values[None], size),
        )
        return total, sent, total_message[k:]


def draw_elements(k: int, size: int, seed: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Draws one element of each of k parts of a vector; returns indices and lengths of the parts, both [k] int32."""
    bounds = tf.range(k + 1, dtype=tf.int64) * size // k
    lengths = bounds[1:] - bounds[:-1]
    offsets = tf.math.floormod(tf.random.stateless_uniform([k], seed, None, None, tf.int64), lengths)
    return tf.cast(bounds[:-1] + offsets, tf.int32), tf.cast(lengths, tf.int32)
