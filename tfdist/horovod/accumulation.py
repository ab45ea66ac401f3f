"""Gradients of several backward passes, added up on this rank before anything is sent."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import InputError
from tfdist.horovod.gradient_sums import Gradient


class Accumulation:
    """Adds the gradients of `passes` calls up. Memory: one tensor of each variable's size, of dense gradients."""

    def __init__(self, passes: int, average: bool):
        """Args: passes: at least 1; average: whether the sum is divided by it."""
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise InputError(f"backward_passes_per_step must be a whole number of at least 1. Received: {passes!r}.")
        self.passes = passes
        self._divisor = passes if average else 1
        self._sums: dict[int, tf.Variable] = {}
        self._count: tf.Variable | None = None

    def anew(self) -> "Accumulation":
        """One of the same settings, that has added nothing up."""
        return Accumulation(self.passes, self._divisor > 1)

    def begin_anew(self) -> None:
        """Forgets the passes since the last update."""
        for kept in (self._count, *self._sums.values()):
            if kept is not None:
                kept.assign(tf.zeros(kept.shape, kept.dtype))

    def add(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> tf.Tensor:
        """Adds one pass; returns whether it was the last one of a step, a scalar bool."""
        count = self._build(gradients, variables)
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                self._sums[i].assign_add(tf.cast(tf.convert_to_tensor(gradient), self._sums[i].dtype))
        return tf.equal(count.assign((count + 1) % self.passes), 0)

    def taken(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        """The sums, or means, of a step; what is kept is zero afterwards, whatever it was (an inf times 0 is no 0)."""
        totals: list[Gradient] = [None] * len(gradients)
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                totals[i] = self._sums[i].read_value() / self._divisor
        with tf.control_dependencies([total for total in totals if total is not None]):
            for kept in self._sums.values():
                kept.assign(tf.zeros(kept.shape, kept.dtype))
        return totals

    def _build(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> tf.Variable:
        with tf.init_scope():
            if self._count is None:
                self._count = tf.Variable(0, trainable=False, name="backward_passes")
            for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
                if gradient is not None and i not in self._sums:
                    self._sums[i] = tf.Variable(tf.zeros(variable.shape, gradient.dtype), trainable=False)
        return self._count
