"""Defines the current collectives, and differentiable operations for layers that communicate in their forward pass.

The loss of a step is the sum of the replicas' losses, so the gradient of a sum over replicas is the sum of the
gradients over replicas: the gradient of an all-reduce is an all-reduce, and all-gather and reduce-scatter are the
gradients of each other. If losses are weighted only after differentiation (`loss_weight_scope`), gradients are weighted
here when they cross replicas.

Tensors passed to the engine are detached with `stop_gradient`; the custom gradients below reconnect them to the graph.
TensorFlow searches the graph between a custom gradient's result and its arguments for variables. Within one process,
where the result depends on all replicas, it would search the models of all other replicas in every layer.
"""

import contextlib
import contextvars
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.collectives.interface import Collectives, Op, SupportedDtypes
from tfdist.keras_internals import context_value

_ALL_DTYPES = frozenset(
    [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.uint8, tf.int32, tf.int64, tf.bool, tf.uint32]
)


class OneReplica(Collectives):
    """A group of one replica: every operation returns its input."""

    size = 1
    rank = 0
    dtypes = SupportedDtypes(reducible=_ALL_DTYPES, gatherable=_ALL_DTYPES, packed=tf.uint8)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        return list(tensors)

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        return list(tensors)


_ONE_REPLICA = OneReplica()
_current: contextvars.ContextVar[Collectives] = contextvars.ContextVar("collectives", default=_ONE_REPLICA)


def current() -> Collectives:
    """Returns the collectives of the current step, or of one replica outside of a step."""
    return _current.get()


def collectives_scope(collectives: Collectives) -> contextlib.AbstractContextManager[None]:
    """Context in which `current` returns `collectives`; a strategy enters it in each replica function, in its thread."""
    return context_value(_current, collectives)


_weight: contextvars.ContextVar[tf.Tensor | None] = contextvars.ContextVar("weight of the loss", default=None)


def loss_weight_scope(weight: tf.Tensor | None) -> contextlib.AbstractContextManager[None]:
    """Context in which a replica's code computes and differentiates a loss that the caller weights afterwards.

    Args:
      weight: scalar; weight of this replica's loss in the sum over replicas. None if the loss is already weighted.
    """
    return context_value(_weight, weight)


def all_reduce(collectives: Collectives, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
    """Sums a tensor over the replicas; differentiable. Cost: one all-reduce forward, one backward."""
    return _call(lambda x: collectives.all_reduce([x], name=name)[0], all_reduce, collectives, tensor, name)


def all_gather(collectives: Collectives, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
    """Stacks a tensor of all replicas along a new first dim, [N, ...]; differentiable.

    Cost: one all-gather forward, one reduce-scatter backward.
    """
    return _call(lambda x: collectives.stack([x], name=name)[0], _reduce_scatter, collectives, tensor, name)


def _reduce_scatter(collectives: Collectives, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
    """Sums a tensor [N, ...] over the replicas and returns this replica's part of it, [...]; differentiable."""
    return _call(lambda x: collectives.reduce_scatter([x], name=name)[0][0], all_gather, collectives, tensor, name)


def _call(
    forward: Callable[[tf.Tensor], tf.Tensor],
    backward: Callable[..., tf.Tensor],
    collectives: Collectives,
    tensor: tf.Tensor,
    name: str,
) -> tf.Tensor:
    @tf.custom_gradient
    def call(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        result = forward(tf.stop_gradient(x))
        return result, weight_gradient(lambda upstream: backward(collectives, upstream, name=f"{name}/gradient"))

    return call(tensor)


def weight_gradient(gradient: Callable[[tf.Tensor], tf.Tensor]) -> Callable[[tf.Tensor], tf.Tensor]:
    """Weights a gradient before it crosses replicas, and divides it by this replica's weight afterwards.

    Weighting by the caller then yields the gradient of the weighted sum of losses.
    """
    weight = _weight.get()
    if weight is None:
        return gradient

    def weighted_gradient(upstream: tf.Tensor) -> tf.Tensor:
        factor = tf.cast(weight, upstream.dtype)
        return tf.math.divide_no_nan(gradient(tf.math.multiply_no_nan(upstream, factor)), factor)

    return weighted_gradient
