"""Collectives through which gradients flow, for layers that communicate in their forward pass.

The loss of a step is the sum of the replicas' losses, so the gradient of a sum over replicas is the sum of the gradients
over replicas: an all-reduce is its own gradient, and the gradient of an all-gather is a reduce-scatter.
"""

from collections.abc import Callable

import tensorflow as tf

from tfdist.collectives.contract import Collectives


def all_reduce(collectives: Collectives, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
    """Sums a tensor over the replicas; differentiable. Cost: one all-reduce forward, one backward."""

    @tf.custom_gradient
    def summed(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        [total] = collectives.all_reduce([x], name=name)
        return total, lambda upstream: collectives.all_reduce([upstream], name=f"{name}/gradient")[0]

    return summed(tensor)


def all_gather(collectives: Collectives, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
    """Stacks a tensor of all replicas along a new first dim, [N, ...]; differentiable.

    Cost: one all-gather forward, one reduce-scatter backward.
    """

    @tf.custom_gradient
    def stacked(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        [whole] = collectives.all_gather([x[None]], name=name)
        return whole, lambda upstream: collectives.reduce_scatter([upstream], name=f"{name}/gradient")[0][0]

    return stacked(tensor)
