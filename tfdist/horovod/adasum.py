"""Adasum (Maleki et al., arXiv:2006.02924): a sum that counts what two vectors have in common only once."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.errors import InputError
from tfdist.horovod.errors import NotSupportedError
from tfdist.horovod.ops import check_num_rank_power_of_2


def adasum(everyone: Sequence[tf.Tensor], what: str) -> tf.Tensor:
    """Combines the ranks' tensors by pairs of neighbors, then pairs of pairs, like Horovod.

    adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b, with the products in float64: a + b if they are
    orthogonal, and a if they are equal.

    Args:
      everyone: one tensor per rank, all of the same shape and floating dtype.
      what: name of the call, for errors.

    Raises:
      NotSupportedError: the number of ranks is not a power of two.
      InputError: the dtype is not floating.
    """
    if not check_num_rank_power_of_2(len(everyone)):
        raise NotSupportedError(
            f"op=hvd.Adasum takes 2, 4, 8 ... ranks. Received: {what} of {len(everyone)}. Use op=hvd.Average."
        )
    if not everyone[0].dtype.is_floating:
        raise InputError(
            f"op=hvd.Adasum takes floats. Received: {what} of {everyone[0].dtype.name}. Use op=hvd.Average."
        )
    tensors = [tf.cast(tensor, tf.float64) for tensor in everyone]
    while len(tensors) > 1:
        tensors = [_pair(a, b) for a, b in zip(tensors[::2], tensors[1::2], strict=True)]
    return tf.cast(tensors[0], everyone[0].dtype)


def _pair(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    common = tf.reduce_sum(a * b)

    def share(x: tf.Tensor) -> tf.Tensor:
        return 1.0 - tf.math.divide_no_nan(common, 2.0 * tf.reduce_sum(x * x))

    return share(a) * a + share(b) * b
