"""Sums and means over ranks, through which gradients flow: what the gradients of other operations are made of."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.horovod.carrying import reduced_as
from tfdist.horovod.engine import Call
from tfdist.horovod.ops import ReduceOp
from tfdist.horovod.process import engine


def linear(
    tensors: Sequence[tf.Tensor], op: ReduceOp, call: Call, prescale: float = 1.0, postscale: float = 1.0
) -> list[tf.Tensor]:
    """A reduction that is its own gradient: Sum, Average, and by Horovod's word Adasum."""

    @tf.custom_gradient
    def differentiable(*xs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        totals = of_engine(xs, op, call, prescale, postscale)
        return totals, lambda *upstream: linear(upstream, op, call.then("gradient"), prescale, postscale)

    return listed(differentiable(*tensors))


def of_engine(
    tensors: Sequence[tf.Tensor], op: ReduceOp, call: Call, prescale: float = 1.0, postscale: float = 1.0
) -> list[tf.Tensor]:
    """The engine's reduction, of dtypes that it does not know too; no gradient flows through it."""
    used, given = engine(), [tf.stop_gradient(tensor) for tensor in tensors]
    return reduced_as(
        used, given, lambda sent: used.reduce(sent, op, call, prescale, postscale), f"{op.name} {call.name}"
    )


def listed(results: Any) -> list[tf.Tensor]:
    """What a function of a custom gradient returned, as a list: of one result it makes a tensor."""
    return list(results) if isinstance(results, list | tuple) else [results]
