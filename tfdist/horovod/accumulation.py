"""Local accumulation of the gradients of several backward passes before they are sent."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.errors import InputError
from tfdist.errors.number_checks import is_integer
from tfdist.horovod.gradient_sums import Gradient, key_of


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
        self._sums: dict[int, tuple[Any, tf.Variable]] = {}  # of the variables that have had a gradient in any pass
        self._count: tf.Variable | None = None
        self._variables: tf.Variable | None = None  # their number now, which a graph may not know

    def anew(self) -> "Accumulation":
        """Returns a new, empty accumulation with the same settings."""
        return Accumulation(self.passes, self._divisor > 1)

    def begin_anew(self) -> None:
        """Discards the passes since the last update."""
        if self._count is not None:
            self._count.assign(0)
        self._reset()

    def add(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> tf.Tensor:
        """Adds one pass; returns whether it was the last one of a step, a scalar bool."""
        count = self._build(gradients, variables)
        for gradient, variable in zip(gradients, variables, strict=True):
            if gradient is not None:
                _, total = self._sums[key_of(variable)]
                total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))
        return tf.equal(count.assign((count + 1) % self.passes), 0)

    def taken(self, variables: Sequence[Any]) -> tuple[list[Gradient], list[Any]]:
        """Returns the sums, or means, of a step and their variables; resets them, whatever their values (inf times 0 is not 0).

        These are the variables of the last pass, with None for those that have never had a gradient, and then all others
        that have had one in any pass. One without a gradient in this step has zeros.
        """
        sums = {key: total for key, (_, total) in self._sums.items()}
        others = sums.keys() - {key_of(variable) for variable in variables}
        every = [*variables, *(variable for key, (variable, _) in self._sums.items() if key in others)]
        with tf.control_dependencies([self._all_known()] if tf.inside_function() else []):
            read = {key: total.read_value() / self._divisor for key, total in sums.items()}
        with tf.control_dependencies(list(read.values())):
            self._reset()
        return [read.get(key_of(variable)) for variable in every], every

    def _reset(self) -> None:
        for _, total in self._sums.values():
            total.assign(tf.zeros(total.shape, total.dtype))

    def _all_known(self) -> tf.Operation:
        """Returns an assertion for a graph: it updates all variables that have had a gradient by the time it runs."""
        return tf.debugging.assert_equal(
            self._variables,
            len(self._sums),
            "backward_passes_per_step: a variable had its first gradient after this tf.function was traced, which would not "
            "update it. Pass zeros instead of None, or pass the variable's gradient to apply before the function is called",
        )

    def _build(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> tf.Variable:
        with tf.init_scope():
            if self._count is None or self._variables is None:
                self._count = tf.Variable(0, trainable=False, name="backward_passes")
                self._variables = tf.Variable(0, trainable=False, name="variables_with_gradients")
            for gradient, variable in zip(gradients, variables, strict=True):
                if gradient is not None and key_of(variable) not in self._sums:
                    total = tf.Variable(tf.zeros(variable.shape, gradient.dtype), trainable=False)
                    self._sums[key_of(variable)] = variable, total
                    self._variables.assign(len(self._sums))
        return self._count
