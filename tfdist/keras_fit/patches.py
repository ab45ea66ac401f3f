"""The table of all patched public names of Keras, and the patches for Keras's `fit`.

A patched method tests whether the model is distributed, or a replica's custom code is running. If not, it calls the
original.
"""

import contextlib
import contextvars
import functools
import logging
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
from tfdist.row_semantics.explanation import listener
from tfdist.step.metrics import KerasMetrics

Distributed = Any  # tfdist.keras_fit.distributed_model.Distributed, which imports this module
# Methods of a distributed model called by users: each is a method of `Distributed`.
_USER_METHODS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
# Methods called by Keras's own methods: each is a method, or a property, of `Distributed`.
_MODEL_METHODS = (
    *_USER_METHODS,
    "make_train_function",
    "make_test_function",
    "make_predict_function",
    "reset_metrics",
    "get_metrics_result",
    "distribute_strategy",
)
# Methods called by custom code on a replica, written for one device, by the name of their class in Keras: each is a function
# of `tfdist.keras_fit.one_device`.
_REPLICA_METHODS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("Model", "train_step", one_device.train_step),
    ("Model", "test_step", one_device.test_step),
    ("Model", "compute_loss", one_device.compute_loss),
    ("Optimizer", "apply", one_device.apply),
    ("optimizers.LossScaleOptimizer", "apply", one_device.apply),
    ("optimizers.LossScaleOptimizer", "scale_loss", one_device.scale_loss),
)
_NOT_DISTRIBUTED = (
    "An optimizer is applied outside fit and train_on_batch: this is not distributed, and every process computes it as "
    "one device would. tfdist distributes fit, evaluate, predict and their ..._on_batch."
)
_TRAINING_LOOP = "a training loop that applies an optimizer itself. Put its step into a train_step of a keras.Model"
_SAVES = ("save", "save_weights")
_SUFFIXES = (".keras", ".h5")  # of formats that are a single file
REPLACED = (
    *(f"keras.Model.{name}" for name in (*_MODEL_METHODS, *_SAVES)),
    *(f"keras.{kind}.{name}" for kind, name, _ in _REPLICA_METHODS),
    "keras.metrics.Mean.update_state",  # by tfdist.step.metrics, since the trainer needs it, too
    "keras.Layer.__call__",  # by tfdist.distribution.mesh_checks, when there is a mesh
    # By tfdist.horovod.
    "keras.Model.compile",
    "keras.Optimizer.lr",
    "keras.Optimizer.variables",
    "keras.optimizers.LossScaleOptimizer.__reduce__",
    "keras.optimizers.LossScaleOptimizer.check_finite",
    "keras.optimizers.LossScaleOptimizer.variables",
)
_ATTRIBUTE = "_tfdist_distributed"
_factories: list[Callable[[keras.Model], Distributed]] = []
_strategies: weakref.WeakSet[Strategy] = weakref.WeakSet()  # strategies of distributed models
_on_one_device: contextvars.ContextVar[bool] = contextvars.ContextVar("Keras's own methods", default=False)
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def on_one_device(model: keras.Model) -> Iterator[None]:
    """Context in which a model's methods are the originals, and its variables those of one device."""
    optimizers = [model.optimizer] if model.compiled and model.optimizer is not None else []
    metrics = KerasMetrics(model).variables
    token = _on_one_device.set(True)
    try:
        with _updating_one_device([*model.variables, *metrics], optimizers):
            yield
    finally:
        _on_one_device.reset(token)


def attach(model: keras.Model, distributed: Distributed) -> None:
    """Replaces the model's patched methods by those of `distributed`."""
    install()
    _patch_own_optimizers(keras.optimizers.Optimizer)
    model.__dict__[_ATTRIBUTE] = distributed  # bypasses Keras's attribute tracking
    _strategies.add(distributed.strategy)


@contextlib.contextmanager
def attach_all(factory: Callable[[keras.Model], Distributed], strategy: Strategy) -> Iterator[None]:
    """Context in which every model is distributed on a strategy, by `factory`, on its first call of `fit` or the like."""
    install()
    _strategies.add(strategy)
    _factories.append(factory)
    try:
        yield
    finally:
        _factories.pop()


def attached(model: keras.Model) -> Distributed | None:
    """Returns the object to which a model is distributed; None if it is not."""
    return model.__dict__.get(_ATTRIBUTE)


@functools.cache
def install() -> None:
    """Patches the names in the table, once per process."""
    for name in _MODEL_METHODS:
        original = getattr(keras.Model, name)
        replacement = _property(name, original) if isinstance(original, property) else _method(name, original)
        setattr(keras.Model, name, replacement)
    for path, name, replacement in _REPLICA_METHODS:
        kind = operator.attrgetter(path)(keras)
        setattr(kind, name, _inside_a_replica(getattr(kind, name), replacement))
    for name in _SAVES:
        setattr(keras.Model, name, _saved_by_rename(getattr(keras.Model, name)))
    keras.optimizers.Optimizer.apply = _outside_replicas(keras.optimizers.Optimizer.apply)


def _patch_own_optimizers(kind: type[keras.Optimizer]) -> None:
    """Patches `apply` of the program's optimizers that have their own: it gets gradients that are already summed."""
    for own in keras_internals.classes_overriding_apply(kind):
        if not hasattr(own.apply, "__wrapped__"):
            own.apply = _inside_a_replica(own.apply, one_device.apply)
    for derived in kind.__subclasses__():
        _patch_own_optimizers(derived)


def _method(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        inside = one_device.current() is not None or _on_one_device.get()
        if attached(self) is None and name in _USER_METHODS and _factories and not inside:
            attach(self, _factories[-1](self))
        distributed = attached(self)
        if distributed is None or inside:
            return original(self, *args, **kwargs)
        # Code of a single process, such as saving in a callback, must not wait for other processes; collective code opens
        # the scope.
        with keras_internals.outside_scopes() if name in _USER_METHODS else contextlib.nullcontext():
            is_eager = name in _USER_METHODS and (self.run_eagerly or tf.config.functions_run_eagerly())
            if is_eager and listener():
                raise InputError(
                    "Steps are explained from their traced operations. Received: run_eagerly=True, with which every process "
                    "computes whole batches. Leave it out."
                )
            call = functools.partial(distributed.eagerly, name) if is_eager else getattr(distributed, name)
            return call(functools.partial(original, self), *args, **kwargs)

    return method


def _property(name: str, original: property) -> property:
    def value(self: keras.Model) -> Any:
        distributed = None if _on_one_device.get() else attached(self)
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


def _outside_replicas(apply: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(apply)
    def method(self: keras.Optimizer, grads: Any, trainable_variables: Any = None, **kwargs: Any) -> Any:
        with _outside_application(self, list(trainable_variables or keras_internals.trained_variables(self))):
            return apply(self, grads, trainable_variables, **kwargs)

    return method


def _saved_by_rename(save: Callable[..., Any]) -> Callable[..., Any]:
    """Patches a save method for programs in which every process saves to the same path.

    Each process writes a complete file and moves it there, without waiting for others.
    """

    @functools.wraps(save)
    def method(self: keras.Model, filepath: Any, overwrite: bool = True, **kwargs: Any) -> Any:
        ranks = [strategy.cluster.rank for strategy in _strategies if strategy.cluster.size > 1]
        path = pathlib.Path(str(filepath))
        if not (ranks and overwrite and path.suffix in _SUFFIXES and not kwargs and "://" not in str(filepath)):
            return save(self, filepath, overwrite, **kwargs)
        temporary = path.with_name(f".{ranks[0]}-{path.name}")
        try:
            save(self, str(temporary))
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return None

    return method


@contextlib.contextmanager
def _outside_application(optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Context in which an optimizer is applied; if not in a replica function, it is by the program's own code."""
    in_replica = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
    in_replica = in_replica or in_replica_function() or one_device.current() is not None
    if in_replica or not (_factories or _strategies):
        yield
        return
    if listener():
        raise InputError(
            f"Only steps of fit, evaluate and train_on_batch can be explained. Received: {_TRAINING_LOOP}."
        )
    if not _on_one_device.get():
        _warn_once()
    with _updating_one_device(variables, [optimizer]):
        yield


@contextlib.contextmanager
def _updating_one_device(variables: Sequence[keras.Variable], optimizers: Sequence[keras.Optimizer]) -> Iterator[None]:
    """Context in which optimizers update variables as on one device; on exit, every replica has the new values."""
    all_variables = [*variables, *(variable for optimizer in optimizers for variable in optimizer.variables)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(keras_internals.updating_one_device(*optimizers))
        for strategy in _strategies:
            stack.enter_context(strategy.adoption.as_one_device(all_variables))
        yield


@functools.cache
def _warn_once() -> None:
    _log.warning(_NOT_DISTRIBUTED)
