"""Provides Horovod's modules `mpi_ops` and `util`, from which scripts import functions."""

import functools
import importlib
import sys
import types
import warnings
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.horovod import object_exchange, operations, ops, process, process_sets
from tfdist.horovod.errors import UnknownNameError


class CallableList(list):
    """A list that returns itself when called, like a method `variables`."""

    def __call__(self) -> "CallableList":
        """Returns the list itself."""
        _warn_once("variables()", "variables", "a property")
        return self


@functools.cache
def add_keras2_names() -> None:
    """Adds `variables()` and `lr` to every Keras optimizer, in addition to `variables` and `learning_rate`.

    `lr` is the TensorFlow variable of the rate, for `assign` and `tf.keras.backend.set_value`; for a schedule, it is the
    current value. The first use of each name logs a warning with the new name.
    """
    optimizers = (keras.Optimizer, keras.optimizers.LossScaleOptimizer)
    for cls in {cls for optimizer in optimizers for cls in optimizer.__mro__ if "variables" in vars(cls)}:
        _make_callable(cls)
    keras.Optimizer.lr = property(_rate, _set_rate, doc="The learning rate, under the name that it had in Keras 2.")


def _make_callable(cls: Any) -> None:
    getter = cls.variables.fget

    @functools.wraps(getter)
    def variables(self: Any) -> CallableList:
        return CallableList(getter(self))

    cls.variables = property(variables)


def _rate(optimizer: keras.Optimizer) -> Any:
    _warn_once("lr", "learning_rate", "the new name")
    rate = optimizer.learning_rate
    return rate.value if isinstance(rate, keras.Variable) else rate


def _set_rate(optimizer: keras.Optimizer, rate: Any) -> None:
    _warn_once("lr", "learning_rate", "the new name")
    optimizer.learning_rate = rate


@functools.cache
def _warn_once(old_name: str, new_name: str, difference: str) -> None:
    warnings.warn(
        f"optimizer.{old_name} works only under tfdist.horovod. Use Keras 3's optimizer.{new_name} instead, which is "
        f"{difference}.",
        FutureWarning,
        stacklevel=3,
    )


def vars_to_refs(vars: Any) -> Any:
    """Returns hashable references to a variable, or to the variables in nested lists."""
    return tuple(map(vars_to_refs, vars)) if isinstance(vars, list) else vars.ref()


def refs_to_vars(refs: Any) -> Any:
    """Returns the variables of references from `vars_to_refs`."""
    return list(map(refs_to_vars, refs)) if isinstance(refs, tuple) else refs.deref()


class HorovodModule(types.ModuleType):
    """A module that contains `names` from one of Horovod's modules, and looks up other names in Horovod."""

    def __init__(self, name: str, names: Mapping[str, Any]):
        super().__init__(f"tfdist.horovod.{name}", f"The names of Horovod's module `{name}`.")
        self._horovod_name = f"horovod.tensorflow.{name}"
        self.__dict__.update(names)
        sys.modules[self.__name__] = self

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and process.horovod_is_installed():
            module = importlib.import_module(self._horovod_name)
            if hasattr(module, name):
                return getattr(module, name)
        raise UnknownNameError(f"{self.__name__} has no {name}. Received: {name}. Use the names of tfdist.horovod.")


def _names_of(*modules: types.ModuleType) -> dict[str, Any]:
    names = {name: value for module in modules for name, value in vars(module).items() if not name.startswith("_")}
    return {
        name: value for name, value in names.items() if getattr(value, "__module__", "").startswith("tfdist.horovod")
    }


mpi_ops = HorovodModule("mpi_ops", _names_of(operations, object_exchange, ops, process, process_sets))
_UTIL_NAMES = {"_executing_eagerly": tf.executing_eagerly, "vars_to_refs": vars_to_refs, "refs_to_vars": refs_to_vars}
util = HorovodModule("util", _UTIL_NAMES)
