"""Random projection: replicas send sums of elements with random signs, the same on all replicas."""

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.gradients.compression.arguments import compile_with_xla, selection_size, validate_flag, validate_ratio
from tfdist.gradients.compression.random_draws import flip_signs, sign_bits
from tfdist.gradients.compression.reducers import Stochastic, finiteness_flag


class Projection(Stochastic):
    """Projects a vector onto k random directions, k = max(1, round(ratio n)).

        S [k, n]: S_ji = s_i if i mod k = j, else 0, with random signs s;   E[S^T S] = I
        y = sum over replicas of S x,   C(x) = S^T (S S^T)^-1 y = S^T y / b,   E |x - C(x)|^2 = (1 - k/n) |x|^2

    This is a row of a count sketch: each element is in one of k sums of b = n/k elements, which are as far apart as
    possible. The rows of S are orthogonal, so C is an orthogonal projection computed in one pass over the vector, and
    error feedback stores the component that is orthogonal to the random subspace. With `unbiased=True`, C(x) = S^T y and
    E C(x) = x, so no feedback is needed, but E |x - C(x)|^2 = (n/k - 1) |x|^2. The signs are derived from the message's
    name and the number of draws.

    Cost: 4 (k + 1) bytes, all-reduced (the 1 shows whether the tensor was finite). Experimental: it has the same
    error as randomk at the same cost.

    Charikar et al., Finding Frequent Items in Data Streams, 2002; Achlioptas, Database-friendly Random Projections,
    2003.
    """

    experimental = True

    def __init__(self, *, ratio: float, unbiased: bool = False):
        """Validates and stores the parameters.

        Args:
          ratio: k/n, in (0, 1].
          unbiased: whether C(x) is unbiased, see above.
        """
        self._ratio = validate_ratio("projection", ratio)
        self._unbiased = validate_flag("projection", "unbiased", unbiased)
        self.biased = not unbiased

    def reduce_with_seed(
        self, x: tf.Tensor, seed: tf.Tensor, collectives: Collectives, *, name: str
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        size = x.shape[0]
        k = selection_size(self._ratio, size)
        bits = sign_bits(-(-size // k), k, seed)
        message = tf.concat([compile_with_xla(_project, size, k)(x, bits), finiteness_flag(x)[None]], axis=0)
        [total_message] = collectives.all_reduce([message], name=name)
        total, sent = (
            compile_with_xla(_back_project, size, k, int(self._unbiased))(y[:k], bits) for y in (total_message, message)
        )
        return total, sent, total_message[k:]


def _project(size: int, k: int, x: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Returns S x, [k]."""
    rows = -(-size // k)
    matrix = tf.reshape(tf.pad(x, [[0, rows * k - size]]), [rows, k])
    return tf.reduce_sum(flip_signs(matrix, bits), axis=0)


def _back_project(size: int, k: int, unbiased: int, y: tf.Tensor, bits: tf.Tensor) -> tf.Tensor:
    """Returns S^T y, [size], divided by the number of elements in each sum unless `unbiased`."""
    rows = -(-size // k)
    full_sums = size - (rows - 1) * k  # number of sums with an element in the last row
    y = y if unbiased else y / tf.cast(tf.where(tf.range(k) < full_sums, rows, rows - 1), tf.float32)
    return tf.reshape(flip_signs(tf.broadcast_to(y, [rows, k]), bits), [-1])[:size]
