"""Keras's own optimizers and losses by name, in the flags' grammar: `sgd(momentum=0.9)`, `mean_squared_error`."""

import inspect
from collections.abc import Mapping
from typing import Any

import keras

from tfdist.errors import InputError
from tfdist.spec import call, load_object, nearest, parse

_BY_LABELS = ("accuracy", "acc", "crossentropy", "ce")  # names that Keras resolves by the labels' form


def create_optimizer(text: str, learning_rate: float) -> keras.Optimizer:
    """Creates an optimizer.

    Args:
      text: `name(key=value, ...)` with the lower-case name of one of Keras's, or a user's `package.module:name(...)`.
      learning_rate: for the argument of this name, unless `text` gives one.

    Raises:
      InputError: the name or an argument is not known.
    """
    spec = parse(text)
    known = _classes(keras.optimizers, keras.Optimizer, without=("Optimizer", "LossScaleOptimizer"))
    made = call(_find(spec.name, known, "--optimizer"), spec, learning_rate=learning_rate)
    if not isinstance(made, keras.Optimizer):
        raise InputError(f"--optimizer={text} must make a keras.Optimizer. Received: {type(made).__name__}.")
    return made


def create_loss(text: str) -> keras.Loss:
    """Creates a loss: `name(key=value, ...)` with the snake_case name of one of Keras's, or a user's own.

    Raises:
      InputError: the name or an argument is not known.
    """
    spec = parse(text)
    made = call(_find(spec.name, _classes(keras.losses, keras.Loss, without=("Loss",)), "--loss"), spec)
    if not isinstance(made, keras.Loss):
        raise InputError(f"--loss={text} must make a keras.Loss. Received: {type(made).__name__}.")
    return made


def create_metrics(text: str) -> list[str]:
    """Checks the names of Keras metrics, for `keras.Model.compile`: what `accuracy` is depends on the labels.

    Args:
      text: names with commas between.

    Raises:
      InputError: a name is not known.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        try:
            found = name in _BY_LABELS or keras.metrics.get(name)
        except ValueError:
            found = None
        if not found:
            known = _classes(keras.metrics, keras.Metric, without=("Metric",))
            raise InputError(f"--metrics={name} is not known.{nearest(name, (*_BY_LABELS, *known))}")
    return names


def _find(name: str, known: Mapping[str, Any], flag: str) -> Any:
    if ":" in name:
        return load_object(name)
    if name not in known:
        raise InputError(f"{flag}={name} is not known.{nearest(name, known)}")
    return known[name]


def _classes(module: Any, base: type, without: tuple[str, ...]) -> dict[str, type]:
    found = inspect.getmembers(module, lambda x: inspect.isclass(x) and issubclass(x, base))
    spell = str.lower if base is keras.Optimizer else _snake
    return {spell(name): value for name, value in found if name not in without}


def _snake(name: str) -> str:
    """SparseCategoricalCrossentropy -> sparse_categorical_crossentropy."""
    return "".join(
        f"_{c.lower()}" if c.isupper() and i and name[i - 1].islower() else c.lower() for i, c in enumerate(name)
    )
