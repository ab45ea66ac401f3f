"""Gathering of the rows of a global batch, of which each replica has a part."""

from collections.abc import Callable

import tensorflow as tf

from tfdist.collectives.context import current
from tfdist.collectives.differentiable import all_reduce, weighted
from tfdist.collectives.dtype_casting import to_transferable
from tfdist.collectives.interface import Collectives


def gather_rows(rows: tf.Tensor, name: str = "rows") -> tf.Tensor:
    """Returns the rows of all replicas, for a loss that compares the rows of a batch with each other; differentiable.

    In-batch negatives, contrastive losses, correlations over a batch and the like need all rows of a global batch,
    while each replica has computed only a part. In a `train_step`, a layer or a loss, gather what is compared, and
    compute either the loss of the whole batch, or that of this replica's rows against all others:

        embeddings = tfdist.gather_rows(self.encoder(images))

    On one device, and outside of a step on replicas, the rows are returned unchanged. Cost: one all-gather forward, one
    all-reduce of all rows backward.

    Args:
      rows: tensor [rows of this replica, ...], of a numeric or bool dtype; the number of rows may differ between
        replicas. Only floating-point rows have a gradient.
      name: names the call; the same on every replica, and unique within a step.

    Returns:
      Tensor [rows of the global batch, ...], in the order of the batch.
    """
    collectives, rows = current(), tf.convert_to_tensor(rows)
    if collectives.size == 1:
        return collectives.all_rows_of(rows, name)
    if not rows.dtype.is_floating:
        return gathered_rows(rows, collectives, name)
    [everyones] = collectives.stack([tf.shape(rows)[0]], name=f"{name}/number")
    first, mine = tf.reduce_sum(everyones[: collectives.rank]), everyones[collectives.rank]

    @tf.custom_gradient
    def gathered(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            exact = to_transferable(upstream, collectives)
            return tf.cast(all_reduce(collectives, exact, name=f"{name}/gradient"), x.dtype)[first : first + mine]

        return gathered_rows(tf.stop_gradient(x), collectives, name), weighted(gradient)

    return gathered(rows[:mine])  # none of a replica without rows in the batch


def gathered_rows(rows: tf.Tensor, collectives: Collectives, name: str) -> tf.Tensor:
    """Returns the rows of all replicas, of any dtype that can be cast to one that the engine gathers; without a gradient."""
    [whole] = collectives.all_gather([any_rows(to_transferable(rows, collectives))], name=name)
    return tf.cast(tf.ensure_shape(whole, [None, *rows.shape[1:]]), rows.dtype)


def any_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Hides a tensor's static number of rows, so that all replicas trace the same function."""
    return tf.compat.v1.placeholder_with_default(tensor, [None, *tensor.shape[1:]])
