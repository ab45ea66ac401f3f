"""An optimizer whose state has values for some of the variables that it trains only."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras

from tfdist.keras_internals.optimizers import updating_one_device


class _Followed(list):
    """A list of variables that tells which one a loop over it has reached: the state created there is that variable's."""

    def __init__(self, variables: Sequence[keras.Variable], reached: Callable[[int | None], None]):
        super().__init__(variables)
        self._reached = reached

    def __iter__(self) -> Iterator[Any]:
        for number, variable in enumerate(super().__iter__()):
            self._reached(number)
            yield variable
        self._reached(None)


def build_for_some(
    optimizer: keras.Optimizer, variables: Sequence[keras.Variable], chosen: Collection[int]
) -> dict[int, int]:
    """Builds an optimizer with the state of all variables, of which that of some has values.

    Names, shapes and order of the optimizer's variables are as if all had values. State that belongs to no variable has a
    value, too. Call it outside of the scope of tf.distribute: its variables are ordinary ones of this process.

    Args:
      optimizer: optimizer that is not built.
      variables: the variables that it trains.
      chosen: numbers of those whose state gets values.

    Returns:
      For each of the optimizer's variables that belongs to a trained one: its `id`, and the number of the trained one.
    """
    kind = keras.Variable
    current: list[int | None] = [None]
    owners: dict[int, int] = {}
    initialize = kind._initialize_with_initializer

    def reached(number: int | None) -> None:
        current[0] = number

    def initialize_some(variable: keras.Variable, initializer: Callable[..., Any]) -> None:
        if current[0] is not None:
            owners[id(variable)] = current[0]
        if current[0] is None or current[0] in chosen:
            initialize(variable, initializer)
        else:
            variable._value, variable._initializer = None, initializer

    kind._initialize_with_initializer = initialize_some
    try:
        with updating_one_device(optimizer):
            optimizer.build(_Followed(variables, reached))
    finally:
        kind._initialize_with_initializer = initialize
    return owners


@contextlib.contextmanager
def averages_of(optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Context in which an optimizer that averages weights averages some of them: Keras would always average all."""
    if not optimizer.use_ema:
        yield
        return
    attributes = vars(optimizer)  # setting an attribute would track the list
    kept = {name: attributes[name] for name in ("_trainable_variables", "_model_variables_moving_average")}
    averages = {id(v): average for v, average in zip(*kept.values(), strict=True)}
    attributes["_trainable_variables"] = list(variables)
    attributes["_model_variables_moving_average"] = [averages[id(variable)] for variable in variables]
    try:
        yield
    finally:
        attributes.update(kept)


def with_values_only(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Returns the variables that have values in this process."""
    return [variable for variable in variables if variable._value is not None]
