"""The state that parts of a step keep from step to step, by name."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfdist.strategy import State, Strategy


class KeptArray(NamedTuple):
    """One state's value.

    Attributes:
      per_replica: whether each replica has a value of its own; else all have the same one.
      values: [local replicas, ...] if per replica, else the value.
    """

    per_replica: bool
    values: np.ndarray


class Kept:
    """Variables for state that others describe; one for each name, for as long as the run."""

    def __init__(self, strategy: Strategy):
        """Args: strategy: places the variables."""
        self._strategy = strategy
        self._kept: dict[str, tuple[State, tf.Variable]] = {}

    def variables(self, states: Sequence[State]) -> list[tf.Variable]:
        """The variables of these states, in order; those that are new are created.

        Raises:
          ValueError: two states have one name.
        """
        names = [state.name for state in states]
        if len(set(names)) < len(names):
            raise ValueError(f"States need names of their own. Received: {sorted(names)}.")
        new = [state for state in states if state.name not in self._kept]
        for state, variable in zip(new, self._strategy.allocate(new), strict=True):
            self._kept[state.name] = (state, variable)
        return [self._kept[name][1] for name in names]

    def array(self, name: str) -> KeptArray:
        """The value of one state, copied to the host."""
        state, variable = self._kept[name]
        values = self._strategy.local(variable)
        own = np.stack([np.asarray(value) for value in values]) if state.per_replica else np.asarray(values[0])
        return KeptArray(state.per_replica, own)

    def arrays(self) -> dict[str, KeptArray]:
        """The values of all states by name, copied to the host."""
        return {name: self.array(name) for name in self._kept}
