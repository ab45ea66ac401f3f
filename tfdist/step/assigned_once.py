"""Variables that several micro-steps of one graph update, assigned once."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from tfdist import keras_internals


class AssignedOnce:
    """Records assignments of variables, such as metrics and moving statistics, over the micro-steps of a step.

    Without loops, they would be assigned in each micro-step of one graph, and DTensor may silently compile that so that only
    one of the updates counts (tests/traps/dtensor_test.py).
    """

    def __init__(self) -> None:
        """Starts without assignments."""
        self._assigned: dict[int, tuple[keras.Variable, Any]] = {}

    @contextlib.contextmanager
    def micro_step(self) -> Iterator[None]:
        """Context of a micro-step, in which variables have the values that earlier ones have assigned."""
        values = self._assigned.values()
        with keras_internals.RecordedScope(values, read=keras_internals.value_of) as scope:
            yield
        self._assigned |= {id(variable): (variable, value) for variable, value in scope.assigned}

    def assign(self) -> None:
        """Assigns the values to the variables."""
        for variable, value in self._assigned.values():
            variable.assign(value)
