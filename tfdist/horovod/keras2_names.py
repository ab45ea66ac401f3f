"""Restores names of Keras's optimizers that Horovod scripts use and Keras 3 removed: `variables()` and `lr`."""

import functools
import warnings
from typing import Any

import keras


class CallableList(list):
    """A list that returns itself when called, like a method `variables`."""

    def __call__(self) -> "CallableList":
        """Returns the list itself."""
        _warn_once("variables()", "variables", "a property")
        return self


@functools.cache
def add_keras2_names() -> None:
    """Gives every Keras optimizer `variables()` and `lr` in addition to `variables` and `learning_rate`.

    `lr` is the TensorFlow variable of the rate, which `assign` and `tf.keras.backend.set_value` change; for a schedule,
    it is the current value. The first use of each warns and names the new form.
    """
    optimizers = (keras.Optimizer, keras.optimizers.LossScaleOptimizer)
    owners = dict.fromkeys(kind for each in optimizers for kind in each.__mro__ if "variables" in vars(kind))
    for kind in owners:
        _make_callable(kind)
    keras.Optimizer.lr = property(_rate, _set_rate, doc="The learning rate, under the name that it had in Keras 2.")


def _make_callable(kind: Any) -> None:
    getter = kind.variables.fget

    @functools.wraps(getter)
    def variables(self: Any) -> CallableList:
        return CallableList(getter(self))

    kind.variables = property(variables)


def _rate(optimizer: keras.Optimizer) -> Any:
    _warn_once("lr", "learning_rate", "its name")
    rate = optimizer.learning_rate
    return rate.value if isinstance(rate, keras.Variable) else rate


def _set_rate(optimizer: keras.Optimizer, rate: Any) -> None:
    _warn_once("lr", "learning_rate", "its name")
    optimizer.learning_rate = rate


@functools.cache
def _warn_once(old: str, new: str, what: str) -> None:
    """Warns of each older name once per process."""
    warnings.warn(
        f"optimizer.{old} is optimizer.{new} in Keras 3, where that is {what}. It works only under tfdist.horovod: "
        f"write optimizer.{new}.",
        FutureWarning,
        stacklevel=3,
    )
