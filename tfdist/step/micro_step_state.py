"""State that layers assign over the micro-steps of a step: what replicas that compute these rows would have together."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import Strategy
from tfdist.step.side_effects import assign, state_of_user
from tfdist.step.weighted_means import MEAN_DTYPE, means_of, weighted_terms


class MicroStepState:
    """State that each micro-step begins as it was before the step, and of which a step leaves the mean, weighted by rows.

    So a counter of steps counts a step once, and a moving mean moves once, however many micro-steps there are. Integers and
    spectrally normalized weights, which do not depend on rows, are those of the last micro-step. The methods are called in
    replica functions.

    Without loops, metrics and moving statistics would be assigned in each micro-step of one graph, and DTensor may silently
    compile that so that only one of the updates counts (tests/traps/dtensor_test.py): they are assigned once, at the end.
    """

    def __init__(self, model: keras.Model, strategy: Strategy):
        """Collects the variables.

        Args:
          model: compiled and built model.
          strategy: strategy of the replicas.
        """
        self._strategy = strategy
        self._means, self._others = state_of_user(model, strategy)
        averaged = {id(variable) for variable in self._means}
        self._others += [v for v in keras_internals.spectrally_normalized(model) if id(v) not in averaged]
        self._before: list[tf.Tensor] = []
        self._assigned: dict[int, tuple[keras.Variable, Any]] | None = None  # None if micro-steps assign themselves

    def specs(self) -> list[tf.TensorSpec]:
        """Returns shapes and dtypes of what `end` returns."""
        specs = [tf.TensorSpec(variable.shape, MEAN_DTYPE) for variable in self._means]
        return [*specs, tf.TensorSpec([], MEAN_DTYPE)] if specs else []

    def begin(self, *, is_unrolled: bool) -> None:
        """Notes the state before the first micro-step; `is_unrolled`: whether one graph has all micro-steps."""
        self._assigned = {} if is_unrolled else None
        self._before = [tf.identity(variable) for variable in (*self._means, *self._others)]

    @contextlib.contextmanager
    def micro_step(self) -> Iterator[None]:
        """Context of a micro-step, which begins with the state before the step, and assigns only this replica's copies."""
        variables = [*self._means, *self._others]
        with self._assigning_later(), self._strategy.own_copies(variables):
            assign(variables, self._before)
            yield

    @contextlib.contextmanager
    def _assigning_later(self) -> Iterator[None]:
        """Context in which variables have the values that micro-steps have assigned so far."""
        if self._assigned is None:
            yield
            return
        with keras_internals.RecordedScope(self._assigned.values(), read=keras_internals.value_of) as scope:
            yield
        self._assigned |= {id(variable): (variable, value) for variable, value in scope.assigned}

    def end(self, rows: tf.Tensor) -> list[tf.Tensor]:
        """Returns what `set_means` takes, to be summed over micro-steps, when a micro-step of this number of rows ends."""
        return weighted_terms(self._means, rows) if self._means else []

    def set_means(self, sums: Sequence[tf.Tensor]) -> None:
        """Assigns the means, and what is left to assign, after the last micro-step."""
        with self._assigning_later():
            assign(self._means, means_of(sums, self._means) if self._means else [])
        for variable, value in (self._assigned or {}).values():
            variable.assign(value)
