"""Sums and means over ranks, through which gradients flow: what the gradients of other operations are made of."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.horovod.adasum import adasum
from tfdist.horovod.carrying import moved_as, reduced_as
from tfdist.horovod.engine import Call, scaled
from tfdist.horovod.ops import Adasum, ReduceOp
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
    """The engine's reduction, of dtypes that it does not know too; no gradient flows through it.

    Adasum is made of a gather, n (N - 1) bytes received for n sent: Horovod has one with MPI and on GPUs alone.
    """
    used, given = engine(), [tf.stop_gradient(tensor) for tensor in tensors]
    if op == Adasum:
        size, what = call.process_set.size(), f"{op.name} {call.name}"
        sent = [scaled(tensor, prescale)[None] for tensor in given]
        wholes = moved_as(used, sent, lambda rows: used.gather(rows, call), what)
        return [scaled(adasum(tf.unstack(whole, size), what), postscale) for whole in wholes]
    return reduced_as(
        used, given, lambda sent: used.reduce(sent, op, call, prescale, postscale), f"{op.name} {call.name}"
    )


def listed(results: Any) -> list[tf.Tensor]:
    """What a function of a custom gradient returned, as a list: of one result it makes a tensor."""
    return list(results) if isinstance(results, list | tuple) else [results]
