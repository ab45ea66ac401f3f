"""Collectives through which gradients flow, for layers that communicate in their forward pass.

The loss of a step is the sum of the replicas' losses, so the gradient of a sum over replicas is the sum of the gradients
over replicas: an all-reduce is its own gradient, and all-gather and reduce-scatter are each other's.

What is handed to the engine is cut off from the graph behind it, to which the gradients given here lead. TensorFlow looks
for variables between a custom gradient's result and its arguments; the result comes from all replicas, so that in one
process it would search the others' whole models, in every layer.
"""

from collections.abc import Callable

import tensorflow as tf

from tfdist.collectives.contract import Collectives


def all_reduce(collectives: Collectives, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
    """Sums a tensor over the replicas; differentiable. Cost: one all-reduce forward, one backward."""

    @tf.custom_gradient
    def summed(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        [total] = collectives.all_reduce([tf.stop_gradient(x)], name=name)
        return total, lambda upstream: all_reduce(collectives, upstream, name=f"{name}/gradient")

    return summed(tensor)


def all_gather(collectives: Collectives, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
    """Stacks a tensor of all replicas along a new first dim, [N, ...]; differentiable.

    Cost: one all-gather forward, one reduce-scatter backward.
    """

    @tf.custom_gradient
    def stacked(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        [whole] = collectives.all_gather([tf.expand_dims(tf.stop_gradient(x), 0)], name=name)
        return whole, lambda upstream: _reduce_scatter(collectives, upstream, name=f"{name}/gradient")

    return stacked(tensor)


def _reduce_scatter(collectives: Collectives, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
    """Sums a tensor [N, ...] over the replicas and returns this replica's part of it, [...]; differentiable."""

    @tf.custom_gradient
    def part(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        [mine] = collectives.reduce_scatter([tf.stop_gradient(x)], name=name)
        return mine[0], lambda upstream: all_gather(collectives, upstream, name=f"{name}/gradient")

    return part(tensor)
