"""Adoption of variables that were created outside of a strategy's scope, for programs that call Keras's own `fit`."""

import contextlib
from collections.abc import Callable, Sequence

import keras


class VariableAdoption:
    """The default, for engines that use plain variables: they may be created anywhere and need no preparation."""

    def __init__(self, synchronize: Callable[[Sequence[keras.Variable]], None]):
        """Initializes the adoption.

        Args:
          synchronize: copies the first replica's values of variables to every replica.
        """
        self._synchronize = synchronize

    def owns(self, variable: keras.Variable) -> bool:
        """Returns whether a variable was created in the strategy's scope, if that makes a difference."""
        return True

    def creation(self) -> contextlib.AbstractContextManager:
        """Context in which variables of a model must be created that do not exist before its first call."""
        return contextlib.nullcontext()

    def adopt(self, variables: Sequence[keras.Variable], optimizers: Sequence[keras.Optimizer] = ()) -> None:
        """Places variables created outside of the scope as if they had been created inside; their values are kept.

        Every process must call it, with the same variables.

        Args:
          variables: variables of models and optimizers.
          optimizers: optimizers that own or update any of them.

        Raises:
          InputError: a variable must be created in the scope.
        """

    def as_one_device(self, variables: Sequence[keras.Variable]) -> contextlib.AbstractContextManager:
        """Context, outside of replica functions, in which variables behave as on one device.

        For code that trains outside of `fit`: on exit, every replica of this process gets the values of its first one.

        Args:
          variables: the variables that the code uses.
        """
        return contextlib.nullcontext()

    def send_from_first(self, variables: Sequence[keras.Variable]) -> None:
        """Copies the first replica's values of adopted variables to every replica; every process must call it."""
        self._synchronize(variables)
