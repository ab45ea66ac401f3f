"""Keras's public names that are replaced: the one table of them.

A replacement asks whether the model is distributed, or whether a replica's own code is under way. If not, it is Keras's own.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from tfdist.stock import one_device

Distributed = Any  # tfdist.stock.distributed.Distributed, which imports this module
# What a user calls, of a model that is distributed: each is a method of `Distributed`.
_CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
# What Keras's own methods call then: each is a method, or a property, of `Distributed`.
_OF_A_MODEL = (
    *_CALLS,
    "make_train_function",
    "make_test_function",
    "make_predict_function",
    "reset_metrics",
    "get_metrics_result",
    "distribute_strategy",
)
# Of the code that a replica runs, which knows of one device alone: each is a function of `tfdist.stock.one_device`.
_OF_A_REPLICA: tuple[tuple[type, str, Callable[..., Any]], ...] = (
    (keras.Model, "train_step", one_device.train_step),
    (keras.Model, "test_step", one_device.test_step),
    (keras.Model, "compute_loss", one_device.compute_loss),
    (keras.optimizers.Optimizer, "apply", one_device.apply),
    (keras.losses.Loss, "__call__", one_device.loss),
)
REPLACED = (
    *(f"keras.Model.{name}" for name in _OF_A_MODEL),
    *(f"keras.{kind.__name__}.{name}" for kind, name, _ in _OF_A_REPLICA),
)
_ATTRIBUTE = "_tfdist_distributed"
_makers: list[Callable[[keras.Model], Distributed]] = []


def attach(model: keras.Model, distributed: Distributed) -> None:
    """From now on the model's replaced methods are those of `distributed`."""
    install()
    model.__dict__[_ATTRIBUTE] = distributed  # past Keras's own tracking of attributes


@contextlib.contextmanager
def attach_all(make: Callable[[keras.Model], Distributed]) -> Iterator[None]:
    """Inside, every model is distributed, by `make`, when its `fit`, `evaluate` or the like is called first."""
    install()
    _makers.append(make)
    try:
        yield
    finally:
        _makers.pop()


def attached(model: keras.Model) -> Distributed | None:
    """What a model's replaced methods are of; None if the model is not distributed."""
    return model.__dict__.get(_ATTRIBUTE)


def overridden(model: keras.Model, name: str) -> bool:
    """Whether a model has a method of its own in the place of one of `keras.Model`'s."""
    return getattr(type(model), name) is not getattr(keras.Model, name) or name in model.__dict__


@functools.cache
def install() -> None:
    """Replaces the names of the table, once in a process."""
    for name in _OF_A_MODEL:
        original = getattr(keras.Model, name)
        replacement = _property(name, original) if isinstance(original, property) else _method(name, original)
        setattr(keras.Model, name, replacement)
    for kind, name, replacement in _OF_A_REPLICA:
        setattr(kind, name, _inside_a_replica(getattr(kind, name), replacement))


def _method(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        inside = one_device.current() is not None
        if attached(self) is None and name in _CALLS and _makers and not inside:
            attach(self, _makers[-1](self))
        distributed = attached(self)
        if distributed is None or inside:
            return original(self, *args, **kwargs)
        return getattr(distributed, name)(functools.partial(original, self), *args, **kwargs)

    return method


def _property(name: str, original: property) -> property:
    def value(self: keras.Model) -> Any:
        distributed = attached(self)
        return original.fget(self) if distributed is None else getattr(distributed, name)  # type: ignore[misc]

    return property(value, original.fset, doc=original.__doc__)


def _inside_a_replica(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        replica = one_device.current()
        if replica is None:
            return original(self, *args, **kwargs)
        return replacement(replica, functools.partial(original, self), self, *args, **kwargs)

    return method
