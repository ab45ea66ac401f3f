"""Keras's optimizers: their update, their slots, their rate."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.optimizers import base_optimizer

from tfdist.keras_internals.variables import UninitializedVariable, births_deferred, value_of


def switch_off_second_sum(optimizer: keras.Optimizer) -> None:
    """Keeps Keras's optimizer from summing gradients over replicas: they arrive whole.

    Keras 3 sums them inside `apply` and has no public switch for it.
    """
    optimizer._all_reduce_sum_gradients = list


def last_learning_rate(optimizer: keras.Optimizer) -> float:
    """The rate of the last update; a schedule's rate is that of the next one."""
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        rate = rate(tf.maximum(tf.convert_to_tensor(optimizer.iterations) - 1, 0))
    return float(tf.convert_to_tensor(rate))


def constant_learning_rate(optimizer: keras.Optimizer) -> float | None:
    """The rate, if it is one number that a variable holds; None for a schedule."""
    rate = optimizer._learning_rate
    scheduled = isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)
    return None if scheduled else float(tf.convert_to_tensor(rate))


@contextlib.contextmanager
def rate_times(optimizer: keras.Optimizer, factor: float) -> Iterator[None]:
    """Inside, updates that are traced have the optimizer's rate, a variable's or a schedule's, times a number.

    Outside, who reads and sets `optimizer.learning_rate`, such as a callback, has the rate without it. To be used around all
    replicas: the threads of a mirrored strategy would undo it for one another.
    """
    if factor == 1:
        yield
        return
    own = optimizer._get_current_learning_rate
    optimizer._get_current_learning_rate = lambda: own() * factor
    try:
        yield
    finally:
        del optimizer._get_current_learning_rate


def trained_by(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """The variables that an optimizer was built for, in its order."""
    return list(optimizer._trainable_variables)


def key_of(variable: keras.Variable) -> str:
    """By what an optimizer knows a variable; another one when the variable was created again."""
    return tf_optimizer.TFOptimizer._var_key(None, variable)  # a method that needs no instance


def follow_variables(optimizer: keras.Optimizer, engine: tf.distribute.Strategy, keys: Mapping[str, str]) -> None:
    """Makes an optimizer work where its variables are now.

    Args:
      optimizer: with variables that were created again.
      engine: in whose scope.
      keys: of these and of the variables that it trains, by the former ones.
    """
    optimizer._distribution_strategy = engine
    optimizer._trainable_variables_indices = {
        keys.get(key, key): index for key, index in optimizer._trainable_variables_indices.items()
    }
    if hasattr(optimizer, "_exclude_from_weight_decay"):
        optimizer._exclude_from_weight_decay = {keys.get(key, key) for key in optimizer._exclude_from_weight_decay}
    optimizer._exclude_from_weight_decay_cache = {}


@contextlib.contextmanager
def updating_one_device(*optimizers: keras.Optimizer) -> Iterator[None]:
    """Inside, optimizers create slots and update variables as on one device, wherever they were made."""
    kept = [optimizer._distribution_strategy for optimizer in optimizers]
    for optimizer in optimizers:
        optimizer._distribution_strategy = tf.distribute.get_strategy()
    try:
        yield
    finally:
        for optimizer, engine in zip(optimizers, kept, strict=True):
            optimizer._distribution_strategy = engine


def velocities_of(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """The slots that a built optimizer with momentum adds rates times gradients up in; none for other optimizers."""
    if isinstance(optimizer, keras.optimizers.RMSprop):
        return [slot for slot in getattr(optimizer, "_momentums", []) if slot is not None]
    if not isinstance(optimizer, keras.optimizers.SGD):
        return []
    return [slot for slot in optimizer.momentums if slot is not None]


def slots_of(optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """What an optimizer would keep for variables that have no values; nothing is computed."""
    abstract_model: list[UninitializedVariable] = []
    with tf.Graph().as_default(), births_deferred(abstract_model, abstract_model.append):
        tf_optimizer.TFOptimizer._var_key = lambda self, variable: id(variable)  # which that restores at its end
        optimizer.build(list(variables))
    return [uninitialized.variable for uninitialized in abstract_model]


@contextlib.contextmanager
def updates_without_effects() -> Iterator[None]:
    """Inside, optimizers assign by Keras's variables alone, so that in `keras.StatelessScope` nothing is assigned.

    On TensorFlow, Keras's optimizers assign to TensorFlow's variables, inside an update of tf.distribute's strategy.
    """
    kind, base = tf_optimizer.TFOptimizer, base_optimizer.BaseOptimizer
    names = ("assign", "assign_add", "assign_sub", "_apply_weight_decay", "_backend_update_step")
    kept = {name: getattr(kind, name) for name in (*names, "_var_key")}
    for name in names:
        setattr(kind, name, getattr(base, name))
    kind._var_key = lambda self, variable: value_of(variable)._unique_id
    try:
        yield
    finally:
        for name, method in kept.items():
            setattr(kind, name, method)
