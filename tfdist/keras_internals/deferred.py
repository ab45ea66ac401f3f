"""Weights without values: a process creates those of a whole model, but holds only the values of its own part."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.common import variables as keras_variables

from tfdist.errors import InputError
from tfdist.keras_internals.variables import note_name_scope


@contextlib.contextmanager
def deferred_weights() -> Iterator[None]:
    """Context in which the weights of layers get no values; other variables, such as states of random layers, do.

    Shapes, dtypes and initializers are those of ordinary weights. Assigning to a weight, also later, sets its initial value.
    """
    kind, add_weight = keras.Variable, keras.Layer.add_weight
    initialize, register = kind._initialize_with_initializer, keras_variables.register_uninitialized_variable

    def defer(variable: keras.Variable, initializer: Callable[..., Any]) -> None:
        variable._value, variable._initializer = None, initializer
        variable._direct_assign = functools.partial(_assign, variable)
        vars(variable).pop("_deferred_initialize", None)
        note_name_scope(variable)

    def defer_later(variable: keras.Variable) -> None:
        """Defers a variable of a layer that is traced to be built, where Keras would create its value: after that."""
        variable._deferred_initialize = functools.partial(defer, variable, variable._initializer)
        register(variable)

    def deferred(self: keras.Layer, *args: Any, **kwargs: Any) -> keras.Variable:
        kind._initialize_with_initializer = defer
        keras_variables.register_uninitialized_variable = defer_later
        try:
            return add_weight(self, *args, **kwargs)
        finally:
            kind._initialize_with_initializer = initialize
            keras_variables.register_uninitialized_variable = register

    keras.Layer.add_weight = deferred
    try:
        yield
    finally:
        keras.Layer.add_weight = add_weight


def _is_deferred(variable: keras.Variable) -> bool:
    return "_direct_assign" in vars(variable)


def _assign(variable: keras.Variable, value: Any) -> None:
    if variable._value is not None:
        type(variable)._direct_assign(variable, value)
    elif not isinstance(variable._initializer, _Refused):
        given = tf.cast(value, variable.dtype)
        variable._initializer = lambda *_, **__: given


def without_call_context(error: Exception) -> Exception:
    """Returns an error to which Keras does not add the arguments of the layer in whose call it is raised."""
    error._keras_call_info_injected = True  # type: ignore[attr-defined]
    return error


@functools.cache
def refuse_training(message: str) -> None:
    """Makes Keras's own training of models with weights from `deferred_weights` without values raise `InputError`, from now on.

    Args:
      message: the message, with `{path}` for the path of such a weight.
    """
    make = keras.Model.make_train_function

    @functools.wraps(make)
    def checked_make(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        missing = next((v for v in self.trainable_variables if v._value is None and _is_deferred(v)), None)
        if missing is not None:
            raise InputError(message.format(path=missing.path))
        return make(self, *args, **kwargs)

    keras.Model.make_train_function = checked_make


class _Refused(NamedTuple):
    """An initializer that raises `InputError`."""

    message: str

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise without_call_context(InputError(self.message))


def refuse_values(variables: Sequence[keras.Variable], message: str) -> None:
    """Makes variables without values raise `InputError` when they are read, and ignore values that are assigned."""
    for variable in variables:
        if variable._value is None:
            variable._initializer = _Refused(message)


@contextlib.contextmanager
def read_by(variables: Sequence[keras.Variable], read: Callable[[keras.Variable], Any]) -> Iterator[None]:
    """Context in which a read of a variable without a value returns that of a function, which is called for each read."""
    initializers = [variable._initializer for variable in variables]
    for variable in variables:
        variable._initializer = lambda *_, variable=variable, **__: read(variable)
    try:
        yield
    finally:
        for variable, initializer in zip(variables, initializers, strict=True):
            variable._initializer = initializer
