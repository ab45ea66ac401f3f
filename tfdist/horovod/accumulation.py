"""Local accumulation of the gradients of several backward passes before they are sent."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import InputError
from tfdist.errors.number_checks import is_integer
from tfdist.horovod.gradient_sums import Gradient


class Accumulation:
    """Sums the gradients of `passes` calls. Memory: one dense tensor of each variable's size."""

    def __init__(self, passes: int, average: bool):
        """Initializes the accumulation.

        Args:
          passes: number of backward passes per step, at least 1.
          average: whether the sum is divided by `passes`.
        """
        if not is_integer(passes) or passes < 1:
            raise InputError(f"backward_passes_per_step must be an integer of at least 1. Received: {passes!r}.")
        self.passes = int(passes)
        self._divisor = self.passes if average else 1
        self._sums: dict[int, tf.Variable] = {}
        self._count: tf.Variable | None = None

    def anew(self) -> "Accumulation":
        """Returns a new, empty accumulation with the same settings."""
        return Accumulation(self.passes, self._divisor > 1)

    def begin_anew(self) -> None:
        """Discards the passes since the last update."""
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
        """Returns the sums, or means, of a step; resets them to zero, whatever their values (inf times 0 is not 0)."""
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
