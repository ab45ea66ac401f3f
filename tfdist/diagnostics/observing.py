"""What reduction does to a step's gradients, seen from inside, in trials that leave the training as it was."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.diagnostics.contract import Site
from tfdist.distribution.strategy import State
from tfdist.gradients import Reducer


class Observing(Reducer):
    """Reduces with another reducer, and observes what it does; a subclass has `reduce`.

    Attributes:
      inner: the other reducer.
      observed: of the last call: tensors, or tuples of them.
    """

    def __init__(self, inner: Reducer):
        """Args: inner: the other reducer."""
        self.inner = inner
        self.keeps_shapes = True
        self.observed: list[Any] = []

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """See base class."""
        return self.inner.state(specs)


class ObservingTrial:
    """A trial of a step with a reducer that observes, made anew when gradients travel by another plan."""

    def __init__(self, site: Site, make: Callable[[], Observing]):
        """Args: make: the reducer for the plan of now."""
        self._site = site
        self._make = make
        self._plan: dict[str, str] | None = None

    def __call__(self, step: int) -> list[Any]:
        """Returns what is observed in a step: for each entry of `observed` a per-replica value."""
        steps = self._site.steps
        if self._plan != steps.overrides:
            self._plan = dict(steps.overrides)
            reducer = self._make()
            self._trial = steps.trial(self._site.batch_size, reducer, read=lambda: reducer.observed)
        _, _, observed = self._trial(self._site.batch(step), tf.constant(step, tf.int64))
        return observed
