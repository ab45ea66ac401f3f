"""Weights without values: a process creates those of a whole model, but holds only the values of its own part."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import variables as keras_variables

from tfdist.errors import InputError


@contextlib.contextmanager
def deferred_weights() -> Iterator[None]:
    """Context in which the weights of layers get no values; other variables, such as states of random layers, do.

    Shapes, dtypes and initializers are those of ordinary weights. Assigning to a weight sets its initial value.
    """
    kind, add_weight = keras.Variable, keras.Layer.add_weight
    initialize, assign, register = (
        kind._initialize_with_initializer,
        kind._direct_assign,
        keras_variables.register_uninitialized_variable,
    )

    def defer(variable: keras.Variable, initializer: Callable[..., Any]) -> None:
        variable._value, variable._initializer = None, initializer

    def deferred(self: keras.Layer, *args: Any, **kwargs: Any) -> keras.Variable:
        kind._initialize_with_initializer = defer
        keras_variables.register_uninitialized_variable = lambda variable: None  # or Keras would initialize it soon
        try:
            return add_weight(self, *args, **kwargs)
        finally:
            kind._initialize_with_initializer = initialize
            keras_variables.register_uninitialized_variable = register

    def assigned(variable: keras.Variable, value: Any) -> None:
        if variable._value is not None:
            assign(variable, value)
        else:
            given = tf.cast(value, variable.dtype)
            variable._initializer = lambda *_, **__: given

    keras.Layer.add_weight, kind._direct_assign = deferred, assigned
    try:
        yield
    finally:
        keras.Layer.add_weight, kind._direct_assign = add_weight, assign


def refuse_values(variables: Sequence[keras.Variable], message: str) -> None:
    """Makes variables without values raise `InputError` when they are read, instead of returning initial values."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise InputError(message)

    for variable in variables:
        if variable._value is None:
            variable._initializer = refuse


@contextlib.contextmanager
def with_values(variables: Sequence[keras.Variable], values: Sequence[Any]) -> Iterator[None]:
    """Context in which variables without values have these."""
    initializers = [variable._initializer for variable in variables]
    for variable, value in zip(variables, values, strict=True):
        variable._initialize(keras.ops.convert_to_tensor(value, variable._dtype))
    try:
        yield
    finally:
        for variable, initializer in zip(variables, initializers, strict=True):
            variable._value, variable._initializer = None, initializer
