"""The curves of learning-rate schedules: the fraction of the peak that each leaves at a step."""

import functools
import math
from typing import Any, NamedTuple

import tensorflow as tf
from keras import ops

from tfdist.grammar.decay import (
    Cosine,
    CosineRestarts,
    Decay,
    Exponential,
    Linear,
    NoDecay,
    OneCycle,
    Own,
    Plateau,
    Polynomial,
    Step,
)

_LAST_START = 2**40  # no run reaches the cycles of restarts that would begin later


class RunProgress(NamedTuple):
    """Where in a run a step is.

    Attributes:
      step: scalar int64, step of the run.
      after: scalar int64, steps since the end of the warmup; negative within it.
      progress: scalar in [0, 1], from the end of the warmup to the end of the run.
    """

    step: tf.Tensor
    after: tf.Tensor
    progress: tf.Tensor


@functools.singledispatch
def remaining(decay: Decay, at: RunProgress) -> tf.Tensor | float:
    """Returns the remaining fraction of the peak.

    Args:
      decay: one of `tfdist.grammar.decay`.
      at: where in the run.
    """
    raise TypeError(f"No rule for {decay!r}.")


@remaining.register(NoDecay)
@remaining.register(Plateau)  # changes the rate by evaluations, which a function of the step does not know
@remaining.register(Own)
def _(decay: Decay, at: RunProgress) -> float:
    return 1.0


@remaining.register
def _(decay: Cosine, at: RunProgress) -> tf.Tensor:
    return decay.to + (1 - decay.to) * 0.5 * (1 + ops.cos(math.pi * at.progress))


@remaining.register
def _(decay: Linear, at: RunProgress) -> tf.Tensor:
    return 1 - (1 - decay.to) * at.progress


@remaining.register
def _(decay: Polynomial, at: RunProgress) -> tf.Tensor:
    return decay.to + (1 - decay.to) * (1 - at.progress) ** decay.power


@remaining.register
def _(decay: Exponential, at: RunProgress) -> tf.Tensor:
    since = ops.cast(ops.maximum(at.after, 0), at.progress.dtype)
    return decay.factor ** (since / decay.every if decay.every else at.progress)


@remaining.register
def _(decay: Step, at: RunProgress) -> tf.Tensor:
    return decay.factor ** ops.cast(ops.floor_divide(at.step, decay.every), at.progress.dtype)


@remaining.register
def _(decay: CosineRestarts, at: RunProgress) -> tf.Tensor:
    dtype = at.progress.dtype
    since = ops.maximum(at.after, 0)
    if decay.t_mul == 1:
        cycle = ops.cast(ops.floor_divide(since, decay.first), dtype)
        part = ops.cast(ops.mod(since, decay.first), dtype) / decay.first
    else:
        cycle, part = _cycle(decay, since, dtype)
    return decay.to + (1 - decay.to) * decay.m_mul**cycle * 0.5 * (1 + ops.cos(math.pi * part))


def _cycle(decay: CosineRestarts, since: tf.Tensor, dtype: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the number of the cycle of a step, and the part of it that is over.

    Cycles are found by comparing integers. The logarithm of Keras's `CosineDecayRestarts` is inexact where one begins.
    """
    begin, length = 0.0, float(decay.first)
    cycle, start, steps = (ops.cast(number, dtype) for number in (0, 0, decay.first))
    while (begin := begin + length) < _LAST_START:
        length *= decay.t_mul
        has_begun = since >= math.ceil(begin)  # scalars: a mesh takes no other constants
        cycle += ops.cast(has_begun, dtype)
        start, steps = ops.where(has_begun, begin, start), ops.where(has_begun, length, steps)
    return cycle, (ops.cast(since, dtype) - start) / steps


@remaining.register
def _(decay: OneCycle, at: RunProgress) -> tf.Tensor:
    first = 1 / decay.div_factor
    last = first / decay.final_div_factor
    rise, fall = _rise_and_fall(decay, at.progress)
    return ops.where(at.progress < decay.pct_start, first + (1 - first) * rise, 1 + (last - 1) * fall)


def momentum(decay: OneCycle, progress: tf.Tensor) -> tf.Tensor:
    """Returns the momentum of the one-cycle policy; `progress`: see `RunProgress`."""
    low, high = decay.base_momentum, decay.max_momentum
    rise, fall = _rise_and_fall(decay, progress)
    return ops.where(progress < decay.pct_start, high + (low - high) * rise, low + (high - low) * fall)


def _rise_and_fall(decay: OneCycle, progress: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns how far the rise and the fall are, both in [0, 1]."""
    rise = ops.clip(progress / decay.pct_start, 0, 1)
    fall = ops.clip((progress - decay.pct_start) / (1 - decay.pct_start), 0, 1)
    if decay.anneal == "linear":
        return rise, fall
    return 0.5 * (1 - ops.cos(math.pi * rise)), 0.5 * (1 - ops.cos(math.pi * fall))
