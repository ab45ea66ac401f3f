"""Patches Keras's methods for `fit` on replicas; the table lists all public names of Keras that tfdist patches.

A patched method calls the original method unless the model is distributed or a replica's custom code is running.
"""

import contextlib
import contextvars
import functools
import operator
import os
import pathlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import Strategy, in_replica_function
from tfdist.errors import InputError
from tfdist.keras_fit import one_device
from tfdist.reporting.warn_once import warn_once
from tfdist.row_semantics.explanation import listener
from tfdist.step.metrics import KerasMetrics

DistributedModel = Any  # tfdist.keras_fit.distributed_model.DistributedModel, which imports this module
# Methods of a distributed model that users call; `DistributedModel.call` replaces them.
_USER_METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
# Methods of a distributed model; those that Keras's own methods call are methods or properties of `DistributedModel`.
_MODEL_METHODS = (
    *_USER_METHODS,
    "make_train_function",
    "make_test_function",
    "make_predict_function",
    "reset_metrics",
    "get_metrics_result",
    "distribute_strategy",
)
# Methods called by custom code on a replica: name of the class in Keras, name of the method, and replacement from
# `tfdist.keras_fit.one_device`.
_REPLICA_METHODS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("Model", "train_step", one_device.train_step),
    ("Model", "test_step", one_device.test_step),
    ("Model", "compute_loss", one_device.compute_loss),
    ("Optimizer", "apply", one_device.apply),
    ("optimizers.LossScaleOptimizer", "apply", one_device.apply),
    ("optimizers.LossScaleOptimizer", "scale_loss", one_device.scale_loss),
)
_NOT_DISTRIBUTED_WARNING = (
    "An optimizer is applied outside fit and train_on_batch. This update is not distributed: every process computes it as "
    "one device would. tfdist distributes fit, evaluate, predict and the ..._on_batch methods."
)
_SAVE_METHODS = ("save", "save_weights")
_SUFFIXES = (".keras", ".h5")  # of single-file formats
PATCHED_NAMES = (
    *(f"keras.Model.{name}" for name in (*_MODEL_METHODS, *_SAVE_METHODS)),
    *(f"keras.{kind}.{name}" for kind, name, _ in _REPLICA_METHODS),
    "keras.metrics.Mean.update_state",  # by tfdist.step.metrics, also for the trainer
    "keras.Layer.__call__",  # by tfdist.distribution.mesh_checks, on a mesh
    # By tfdist.horovod.
    "keras.Model.compile",
    "keras.Optimizer.lr",
    "keras.Optimizer.variables",
    "keras.optimizers.LossScaleOptimizer.__reduce__",
    "keras.optimizers.LossScaleOptimizer.check_finite",
    "keras.optimizers.LossScaleOptimizer.variables",
)
_ATTRIBUTE = "_tfdist_distributed"
_factories: list[Callable[[keras.Model], DistributedModel]] = []
_strategies: weakref.WeakSet[Strategy] = weakref.WeakSet()  # strategies of distributed models
_uses_one_device: contextvars.ContextVar[bool] = contextvars.ContextVar("Keras's own methods", default=False)


@contextlib.contextmanager
def one_device_context(model: keras.Model) -> Iterator[None]:
    """Context in which a model has its original methods and behaves as on one device."""
    optimizers = [model.optimizer] if model.compiled and model.optimizer is not None else []
    variables = [*model.variables, *KerasMetrics(model).variables]
    uses_one_device = keras_internals.context_value(_uses_one_device, True)
    with uses_one_device, _one_device_updates(variables, optimizers):
        yield


def attach(model: keras.Model, distributed: DistributedModel) -> None:
    """Makes the model's patched methods call the methods of `distributed`."""
    install()
    _patch_custom_optimizers(keras.optimizers.Optimizer)
    model.__dict__[_ATTRIBUTE] = distributed  # bypasses Keras's attribute tracking
    _strategies.add(distributed.strategy)


@contextlib.contextmanager
def attach_all(factory: Callable[[keras.Model], DistributedModel], strategy: Strategy) -> Iterator[None]:
    """Context in which `factory` distributes every model on its first call of `fit` or a similar method."""
    install()
    _strategies.add(strategy)
    _factories.append(factory)
    try:
        yield
    finally:
        _factories.pop()


def distribution_of(model: keras.Model) -> DistributedModel | None:
    """Returns the object that distributes a model; None if it is not distributed."""
    return model.__dict__.get(_ATTRIBUTE)


@functools.cache
def install() -> None:
    """Patches the names in the table, once per process."""
    for name in _MODEL_METHODS:
        original = getattr(keras.Model, name)
        setattr(keras.Model, name, (_property if isinstance(original, property) else _method)(name, original))
    for path, name, replacement in _REPLICA_METHODS:
        kind = operator.attrgetter(path)(keras)
        setattr(kind, name, _replica_method(getattr(kind, name), replacement))
    for name in _SAVE_METHODS:
        setattr(keras.Model, name, _atomic_save(getattr(keras.Model, name)))
    apply = keras.optimizers.Optimizer.apply

    @functools.wraps(apply)
    def guarded_apply(self: keras.Optimizer, grads: Any, trainable_variables: Any = None, **kwargs: Any) -> Any:
        with _application_context(self, list(trainable_variables or keras_internals.trained_variables(self))):
            return apply(self, grads, trainable_variables, **kwargs)

    keras.optimizers.Optimizer.apply = guarded_apply


def _patch_custom_optimizers(base_class: type[keras.Optimizer]) -> None:
    """Patches `apply` of user-defined optimizers, so that it receives summed gradients."""
    for optimizer_class in keras_internals.classes_overriding_apply(base_class):
        if not hasattr(optimizer_class.apply, "__wrapped__"):
            optimizer_class.apply = _replica_method(optimizer_class.apply, one_device.apply)
    for subclass in base_class.__subclasses__():
        _patch_custom_optimizers(subclass)


def _method(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    is_user_method = name in _USER_METHODS

    @functools.wraps(original)
    def method(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        is_undistributed = one_device.current_replica() is not None or _uses_one_device.get()
        if distribution_of(self) is None and is_user_method and _factories and not is_undistributed:
            attach(self, _factories[-1](self))
        distributed = distribution_of(self)
        if distributed is None or is_undistributed:
            return original(self, *args, **kwargs)
        if not is_user_method:
            return getattr(distributed, name)(functools.partial(original, self), *args, **kwargs)
        is_eager = self.run_eagerly or tf.config.functions_run_eagerly()
        if is_eager and listener():
            raise InputError(
                "Steps are explained from their traced operations. Received: run_eagerly=True, with which every process "
                "computes whole batches. Remove it."
            )
        call = distributed.call_eagerly if is_eager else distributed.call
        # Code of a single process, such as saving in a callback, must not wait for other processes; collective code opens
        # the scope.
        with keras_internals.outside_scopes():
            return call(name, functools.partial(original, self), *args, **kwargs)

    return method


def _property(name: str, original: property) -> property:
    def value(self: keras.Model) -> Any:
        distributed = None if _uses_one_device.get() else distribution_of(self)
        return original.fget(self) if distributed is None else getattr(distributed, name)  # type: ignore[misc]

    return property(value, original.fset, doc=original.__doc__)


def _replica_method(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        replica = one_device.current_replica()
        if replica is None:
            return original(self, *args, **kwargs)
        return replacement(replica, functools.partial(original, self), self, *args, **kwargs)

    return method


def _atomic_save(save: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a save method for programs in which every process saves to the same path.

    Each process writes a complete file and renames it, without waiting for other processes.
    """

    @functools.wraps(save)
    def method(self: keras.Model, filepath: Any, overwrite: bool = True, **kwargs: Any) -> Any:
        ranks = [strategy.cluster.rank for strategy in _strategies if strategy.cluster.size > 1]
        path = pathlib.Path(str(filepath))
        if not (ranks and overwrite and path.suffix in _SUFFIXES and not kwargs and "://" not in str(filepath)):
            return save(self, filepath, overwrite, **kwargs)
        temporary_path = path.with_name(f".{ranks[0]}-{path.name}")
        try:
            save(self, str(temporary_path))
            os.replace(temporary_path, path)
        finally:
            temporary_path.unlink(missing_ok=True)
        return None

    return method


@contextlib.contextmanager
def _application_context(optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Context of an application of an optimizer; outside replica functions, it warns and updates as one device would."""
    is_in_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    is_in_replica = is_in_replica or in_replica_function() or one_device.current_replica() is not None
    if is_in_replica or not (_factories or _strategies):
        yield
        return
    if listener():
        raise InputError(
            "Only steps of fit, evaluate and train_on_batch can be explained. Received: a training loop that applies an "
            "optimizer itself. Move its step to the train_step of a keras.Model."
        )
    if not _uses_one_device.get():
        warn_once(_NOT_DISTRIBUTED_WARNING)
    with _one_device_updates(variables, [optimizer]):
        yield


@contextlib.contextmanager
def _one_device_updates(variables: Sequence[keras.Variable], optimizers: Sequence[keras.Optimizer]) -> Iterator[None]:
    """Context in which optimizers update variables as on one device; on exit, every replica has the new values."""
    all_variables = [*variables, *(variable for optimizer in optimizers for variable in optimizer.variables)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras_internals.single_device_updates(*optimizers))
        for strategy in _strategies:
            stack.enter_context(strategy.adoption.as_one_device(all_variables))
        yield
