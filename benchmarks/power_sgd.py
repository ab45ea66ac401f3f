"""PowerSGD as a user of Horovod's operations would write it: the plain version that tfdist's own is held against."""

from collections.abc import Callable, Sequence

import tensorflow as tf


class PowerSGD:
    """Averages gradients over ranks, matrices of them as products of two thin ones (Vogels et al., 2019).

    For M = gradient + error of [m, n]: P = orthogonal(mean(M Q)), Q = mean(M^T P), the average is P Q^T, and the next
    error is M - P Q^T. It sends 4 rank (m + n) bytes of 4 m n.
    """

    def __init__(self, variables: Sequence[tf.Variable], rank: int, mean: Callable[..., list[tf.Tensor]]):
        """Initialises Q from a seed.

        Args:
          variables: those of the gradients, in order.
          rank: columns of P and of Q.
          mean: averages a list of tensors over ranks; takes a name for the message.
        """
        shapes = [
            (v.shape.num_elements() // v.shape[-1], v.shape[-1]) if v.shape.rank > 1 else (1, 1) for v in variables
        ]
        self._mean = mean
        # What would not even halve goes as it is.
        self._thin = [i for i, (m, n) in enumerate(shapes) if 2 * rank * (m + n) < m * n]
        self._rest = [i for i in range(len(shapes)) if i not in self._thin]
        self._errors = [tf.Variable(tf.zeros(shapes[i])) for i in self._thin]
        self._qs = [tf.Variable(tf.random.stateless_normal([shapes[i][1], rank], seed=[0, i])) for i in self._thin]

    def __call__(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the averages, in order; to be called once in a `tf.function`."""
        matrices = [tf.reshape(gradients[i], e.shape) + e for i, e in zip(self._thin, self._errors, strict=True)]
        ps = [matrix @ q for matrix, q in zip(matrices, self._qs, strict=True)]
        first = self._mean([*ps, *(gradients[i] for i in self._rest)], name="powersgd_p")
        ps = [tf.linalg.qr(p).q for p in first[: len(ps)]]
        qs = [tf.matmul(matrix, p, transpose_a=True) for matrix, p in zip(matrices, ps, strict=True)]
        qs = self._mean(qs, name="powersgd_q")
        averages = dict(zip(self._rest, first[len(ps) :], strict=True))
        for k, i in enumerate(self._thin):
            product = tf.matmul(ps[k], qs[k], transpose_b=True)
            self._errors[k].assign(matrices[k] - product)
            self._qs[k].assign(qs[k])
            averages[i] = tf.reshape(product, gradients[i].shape)
        return [averages[i] for i in range(len(gradients))]
