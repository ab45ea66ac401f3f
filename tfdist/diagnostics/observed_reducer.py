"""Observes the reduction of gradients in probe steps, which leave the training state unchanged."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.diagnostics.interface import RunView
from tfdist.distribution.strategy import State
from tfdist.gradients import Reducer


class ObservingReducer(Reducer):
    """Base class of reducers that wrap another one and observe it; subclasses implement `reduce`.

    Attributes:
      inner: the wrapped reducer.
      observed: tensors, or tuples of tensors, observed in the last call.
    """

    def __init__(self, inner: Reducer):
        """Wraps a reducer.

        Args:
          inner: the reducer.
        """
        self.inner = inner
        self.keeps_shapes = True
        self.observed: list[Any] = []

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """See base class."""
        return self.inner.state(specs)


class ObservingTrial:
    """A probe step with an observing reducer; compiled again when the choice of compression methods changes."""

    def __init__(self, run_view: RunView, make: Callable[[], ObservingReducer]):
        """Initializes the step.

        Args:
          run_view: the run to inspect.
          make: creates the reducer for the current compression methods.
        """
        self._run_view = run_view
        self._make = make
        self._plan: dict[str, str] | None = None

    def __call__(self, step: int) -> list[Any]:
        """Runs the probe step; returns a per-replica value for each entry of `observed`."""
        steps = self._run_view.steps
        if self._plan != steps.overrides:
            self._plan = dict(steps.overrides)
            reducer = self._make()
            self._probe = steps.probe(self._run_view.batch_size, reducer, read=lambda: reducer.observed)
        _, _, observed = self._probe(self._run_view.batch(step), tf.constant(step, tf.int64))
        return observed
