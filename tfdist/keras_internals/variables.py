"""Keras's variables: how they are born, what they stand for, what is kept with them."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common import variables as keras_variables
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.tensorflow import optimizer as tf_optimizer


class UninitializedVariable(NamedTuple):
    """A variable that has an initializer and no value yet, and the layers in whose methods it was made, innermost last."""

    variable: keras.Variable
    owners: list[Any]


@contextlib.contextmanager
def births_deferred(
    abstract_model: list[UninitializedVariable], bear: Callable[[UninitializedVariable], None]
) -> Iterator[None]:
    """Inside, variables that have initializers get no value: who opened this gives them one with `give_value`.

    Read, such a variable is what its initializer says; assigned to, it begins with that.

    Args:
      abstract_model: gets each such variable.
      bear: called for a variable that Keras made while it traced a model and wants to have now.
    """
    kind, optimizers = keras.Variable, tf_optimizer.TFOptimizer
    initialize, assign, register, key = (
        kind._initialize_with_initializer,
        kind._direct_assign,
        keras_variables.register_uninitialized_variable,
        optimizers._var_key,
    )
    traced: dict[int, UninitializedVariable] = {}

    def defer(variable: keras.Variable, initializer: Callable[..., Any]) -> None:
        variable._initializer = initializer
        if id(variable) in traced:
            bear(traced.pop(id(variable)))
        else:
            variable._value = None
            abstract_model.append(UninitializedVariable(variable, _callers()))

    def note(variable: keras.Variable) -> None:
        traced[id(variable)] = UninitializedVariable(variable, _callers())
        register(variable)

    def assign_to(variable: keras.Variable, value: Any) -> None:
        if variable._value is not None:
            assign(variable, value)
        else:
            given = tf.cast(value, variable.dtype)
            variable._initializer = lambda *_, **__: given

    def key_of(optimizer: keras.Optimizer, variable: keras.Variable) -> Any:
        for i, uninitialized in enumerate(
            abstract_model
        ):  # an optimizer that is built here wants the variable as it will be
            if uninitialized.variable is variable:
                bear(abstract_model.pop(i))
                break
        return key(optimizer, variable)

    kind._initialize_with_initializer, kind._direct_assign, optimizers._var_key = defer, assign_to, key_of
    keras_variables.register_uninitialized_variable = note
    try:
        yield
    finally:
        kind._initialize_with_initializer, kind._direct_assign, optimizers._var_key = initialize, assign, key
        keras_variables.register_uninitialized_variable = register


def initial_value(variable: keras.Variable) -> tf.Tensor:
    """What a variable without a value begins with, computed now."""
    return tf.cast(variable._initializer(variable._shape, dtype=variable._dtype), variable._dtype)


def give_value(variable: keras.Variable, value: tf.Variable) -> None:
    """Makes TensorFlow's variable the one that Keras's stands for."""
    variable._value, variable._initializer = value, None


def create_again(variable: keras.Variable, scope: contextlib.AbstractContextManager) -> None:
    """Creates the variable that Keras's stands for once more, inside a scope, with the value that it has."""
    value = tf.identity(variable.value)
    with scope:
        variable._initialize(value)


def let_tapes_watch(copies: Sequence[tf.Variable]) -> None:
    """Makes gradient tapes see the copies of a variable.

    They do not see one that was frozen when it was created. Keras unfreezes what it holds, which is not the copies.
    """
    for copy in copies:
        copy._trainable = True


@contextlib.contextmanager
def standing_for(variables: Sequence[keras.Variable], copies: Sequence[Sequence[tf.Variable]]) -> Iterator[None]:
    """Inside, variables stand for the first of their copies; at the end the others get its value.

    Args:
      variables: Keras's.
      copies: of each, TensorFlow's variables that are its values on devices.
    """
    kept = [variable._value for variable in variables]
    for variable, (first, *_) in zip(variables, copies, strict=True):
        variable._value = first
    try:
        yield
    finally:
        for first, *others in copies:
            for other in others:
                other.assign(first)
        for variable, value in zip(variables, kept, strict=True):
            variable._value = value


def value_of(variable: keras.Variable) -> Any:
    """TensorFlow's variable that Keras's stands for; None as long as it has none."""
    return variable._value


class RecordedScope(keras.StatelessScope):
    """A scope that knows what was assigned inside, and keeps the losses that layers add.

    Attributes:
      assigned: variable and value, in the order of the last assignments; what the scope was given is not among them.
      held: by the ids of variables, what their values are computed from.
    """

    def __init__(
        self,
        state_mapping: Iterable[tuple[keras.Variable, Any]],
        held: Iterable[tuple[keras.Variable, Any]] = (),
        read: Callable[[keras.Variable], Any] = lambda variable: None,
    ):
        """Opens no scope yet.

        Args:
          state_mapping: values of variables inside.
          held: what they are computed from, where that is another tensor.
          read: gives the value of another variable, or None for its own.
        """
        super().__init__(state_mapping=list(state_mapping), collect_losses=True)
        self._read = read
        self.held = {id(variable): value for variable, value in held}
        self._updates: dict[int, tuple[keras.Variable, Any]] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        """See base class."""
        value = super().get_current_value(variable)
        return self._read(variable) if value is None else value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """See base class."""
        super().add_update(update)
        self._updates[id(update[0])] = update
        self.held.pop(id(update[0]), None)  # from now on its value is what was assigned

    @property
    def assigned(self) -> list[tuple[keras.Variable, Any]]:
        """See the class."""
        return list(self._updates.values())


def held_value(variable: keras.Variable) -> tf.Tensor:
    """What a variable's value is computed from, in the innermost `RecordedScope` if one is open; by itself its value."""
    scope = get_stateless_scope()
    if isinstance(scope, RecordedScope) and id(variable) in scope.held:
        return scope.held[id(variable)]
    return uncast_value(variable)


def uncast_value(variable: keras.Variable) -> tf.Tensor:
    """A variable's value in its own dtype, also where a layer of mixed precision computes."""
    with keras_variables.AutocastScope(None):
        return tf.convert_to_tensor(variable.value)


def bytes_of(variable: keras.Variable) -> int:
    """Bytes of a whole variable."""
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def layout_of(variable: keras.Variable) -> Any:
    """What `set_layout` said; an optimizer's slot has its variable's."""
    return variable._layout


def set_layout(variable: keras.Variable, layout: Any) -> None:
    """Keeps a layout with a variable. Keras hands it on to the optimizer's slots."""
    variable._layout = layout


def _callers() -> list[Any]:
    stack = global_state.get_global_attribute("name_scope_stack") or []
    return [scope.caller for scope in stack if scope.caller is not None]
