"""Variables that have other values for some time, such as averages of weights during an evaluation."""

import abc
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import HasCollectives


class TemporaryValues(abc.ABC):
    """Context in which variables have other values; every process must enter it.

    Each replica's own values are restored bit for bit on exit; meanwhile they take memory in addition to the others.
    """

    def __init__(self, variables: Sequence[keras.Variable], strategy: HasCollectives):
        """Initializes the context; compiles nothing yet.

        Args:
          variables: variables of the model or the optimizer.
          strategy: strategy of the replicas.
        """
        self._variables, self._strategy = list(variables), strategy
        self._take = strategy.compiled_for_variables(self._taken)
        self._restore = strategy.compiled_for_variables(self._assign)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Returns the context."""
        if not self._changes_values:
            yield
            return
        own = self._take()
        try:
            yield
        finally:
            self._restore(own)

    @property
    def _changes_values(self) -> bool:
        """Whether the values are others than the variables have."""
        return bool(self._variables)

    @abc.abstractmethod
    def _values(self, own: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the values to assign, from this replica's own ones. A replica function."""

    def _taken(self) -> list[tf.Tensor]:
        """Assigns the values; returns this replica's own ones. A replica function."""
        own = [tf.identity(keras_internals.value_of(variable)) for variable in self._variables]
        values = self._values(own)
        with tf.control_dependencies(own):
            self._assign(values)
        return own

    def _assign(self, values: Any) -> None:
        """Assigns values of all variables. A replica function."""
        for variable, value in zip(self._variables, values, strict=True):
            keras_internals.value_of(variable).assign(self._strategy.layouts.stored(variable, value))


class TemporaryLocalValues(TemporaryValues):
    """Temporary values of variables of which each replica has its own value."""

    def _assign(self, values: Any) -> None:
        """See base class; changes only this replica's variables."""
        with self._strategy.own_copies(self._variables):
            super()._assign(values)
