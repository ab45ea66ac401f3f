"""Differentiable sums and means over ranks, from which the gradients of other operations are composed."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.horovod.adasum import adasum
from tfdist.horovod.dtype_casting import moved_as, reduced_as
from tfdist.horovod.engine import CallId, scaled
from tfdist.horovod.ops import Adasum, ReduceOp
from tfdist.horovod.process import engine


def linear(
    tensors: Sequence[tf.Tensor], op: ReduceOp, call: CallId, prescale: float = 1.0, postscale: float = 1.0
) -> list[tf.Tensor]:
    """Reduces tensors by an operation that is its own gradient: Sum, Average and, as defined by Horovod, Adasum."""

    @tf.custom_gradient
    def differentiable(*xs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        totals = of_engine(xs, op, call, prescale, postscale)
        return totals, lambda *upstream: linear(upstream, op, call.then("gradient"), prescale, postscale)

    return listed(differentiable(*tensors))


def of_engine(
    tensors: Sequence[tf.Tensor], op: ReduceOp, call: CallId, prescale: float = 1.0, postscale: float = 1.0
) -> list[tf.Tensor]:
    """Reduces tensors of any dtype through the engine; not differentiable.

    Adasum is composed of a gather, n (N - 1) bytes received for n sent: Horovod supports it only with MPI and on GPUs.
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
    """Returns the results of a function with a custom gradient as a list; a single result is a tensor."""
    return list(results) if isinstance(results, list | tuple) else [results]
