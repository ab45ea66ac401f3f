"""Accesses internals of Keras's variables: their creation, their values, and attributes attached to them."""

import contextlib
import functools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.common import variables as keras_variables
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from tensorflow.python.distribute import values
from tensorflow.python.eager import context

from tfdist.errors import InputError
from tfdist.keras_internals.models import is_user_defined
from tfdist.keras_internals.patching import Context, patched


class UninitializedVariable(NamedTuple):
    """A variable that has an initializer but no value yet."""

    variable: keras.Variable
    owners: list[Any]  # the layers in whose methods it was created, innermost last


def deferred_creation(
    uninitialized_variables: list[UninitializedVariable], create: Callable[[UninitializedVariable], None]
) -> Context:
    """Context in which variables with initializers are created without a value, for an abstract model.

    They are appended to `uninitialized_variables`, and the caller initializes them later with `set_tf_variable`. Until then,
    reading such a variable runs its initializer, and assigning to it sets its initial value. `create` initializes a variable
    that Keras created while tracing a model, when its value is needed.
    """
    kind, optimizers = keras.Variable, tf_optimizer.TFOptimizer
    assign, key, register = kind._direct_assign, optimizers._var_key, keras_variables.register_uninitialized_variable
    traced_variables: dict[int, UninitializedVariable] = {}

    def defer(variable: keras.Variable, initializer: Callable[..., Any]) -> None:
        variable._initializer = initializer
        record_name_scope(variable)
        if id(variable) in traced_variables:
            create(traced_variables.pop(id(variable)))
        else:
            variable._value = None
            uninitialized_variables.append(UninitializedVariable(variable, _callers()))

    def register_traced(variable: keras.Variable) -> None:
        traced_variables[id(variable)] = UninitializedVariable(variable, _callers())
        register(variable)

    def key_of(optimizer: keras.Optimizer, variable: keras.Variable) -> Any:
        for i, uninitialized in enumerate(uninitialized_variables):  # the optimizer needs an initialized variable
            if uninitialized.variable is variable:
                create(uninitialized_variables.pop(i))
                break
        return key(optimizer, variable)

    return patched(
        (kind, "_initialize_with_initializer", defer),
        (kind, "_direct_assign", lambda variable, value: _assign(assign, variable, value)),
        (optimizers, "_var_key", key_of),
        (keras_variables, "register_uninitialized_variable", register_traced),
    )


def initial_value(variable: keras.Variable) -> tf.Tensor:
    """Computes the initial value of a variable without a value."""
    return tf.cast(variable._initializer(variable._shape, dtype=variable._dtype), variable._dtype)


def initialize(variable: keras.Variable) -> None:
    """Initializes a variable that was created without a value, as Keras would have done."""
    with recorded_name_scope(variable):
        variable._deferred_initialize()


def record_name_scope(variable: keras.Variable) -> None:
    """Records the current name scope for the TensorFlow variable to be created, whose name optimizers use."""
    variable._name_scope = tf.get_current_name_scope()


def recorded_name_scope(variable: keras.Variable) -> contextlib.AbstractContextManager[Any]:
    """Returns a context with the recorded name scope, in which to create the TensorFlow variable."""
    scope = getattr(variable, "_name_scope", "")
    return tf.name_scope(scope and f"{scope}/")  # the trailing slash makes it absolute


def states_of_generators() -> tuple[Any, ...]:
    """Returns the states of the global random number generators, as comparable values."""
    generator = global_state.get_global_attribute("global_seed_generator")
    keras_state = None if generator is None else tuple(generator.state.numpy().tolist())
    tensorflow_state = getattr(context.context(), "_rng", None)  # exists if a global seed is set
    return (
        random.getstate(),
        repr(np.random.get_state(legacy=False)["state"]),
        keras_state,
        tensorflow_state and tensorflow_state.getstate(),
    )


def set_tf_variable(variable: keras.Variable, value: tf.Variable) -> None:
    """Sets the TensorFlow variable that stores the value of a Keras variable."""
    variable._value, variable._initializer = value, None


def create_variables_with(create: Callable[[keras.Variable, Any], tf.Variable]) -> Context:
    """Context in which `create` creates the variables that have a layout, and their optimizer variables."""
    kind = keras.Variable
    initialize = kind._initialize

    def initialize_variable(variable: keras.Variable, value: Any) -> None:
        if layout_of(variable) is None or isinstance(value, tf.Variable):
            initialize(variable, value)
            return
        initial = value() if callable(value) else value
        variable._value = create(variable, tf.cast(initial, variable._dtype))

    return patched((kind, "_initialize", initialize_variable))


def owners_of_variables(model: keras.Model) -> dict[int, list[keras.Layer]]:
    """Returns the layers that contain each trainable variable, innermost last, by the variable's id."""
    owners_by_id: dict[int, list[keras.Layer]] = {}

    def visit(layer: keras.Layer, outer_layers: list[keras.Layer]) -> None:
        owners = [*outer_layers, layer]
        for variable in layer._trainable_variables:
            owners_by_id.setdefault(id(variable), owners)
        for sublayer in layer._layers:
            visit(sublayer, owners)

    visit(model, [])
    return owners_by_id


def moving_statistics(model: keras.Model) -> list[keras.Variable]:
    """Returns the floating-point variables that a forward pass may change, such as moving means."""
    weights = {id(variable) for layer in model._flatten_layers() for variable in layer._trainable_variables}
    untrained = [v for v in model.non_trainable_variables if v.trainable is False and tf.as_dtype(v.dtype).is_floating]
    return [variable for variable in untrained if id(variable) not in weights]


def user_layer_state(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of user-defined layers, and of a user-defined model, that are not weights."""
    user_layers = [layer for layer in model._flatten_layers() if is_user_defined(layer)]
    variables_by_id = {id(v): v for layer in user_layers for v in layer._non_trainable_variables if not v.trainable}
    return list(variables_by_id.values())


def spectral_norm_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the kernels that `SpectralNormalization` layers normalize in training, and their power iteration vectors."""
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.SpectralNormalization)]
    variables = [variable for layer in layers if layer.built for variable in (layer.kernel, layer.vector_u)]
    return list({id(variable): variable for variable in variables}.values())


def recreate_variable(variable: keras.Variable, scope: contextlib.AbstractContextManager) -> None:
    """Recreates the TensorFlow variable of a Keras variable inside a scope, with its current value and name."""
    value, name = tf.identity(variable.value), variable.value.name
    with scope, tf.name_scope(name[: name.rfind("/") + 1]):
        variable._initialize(value)


def watch_copies(copies: Sequence[tf.Variable]) -> None:
    """Makes gradient tapes watch the copies of a variable, even if it was frozen when it was created."""
    for copy in copies:
        copy._trainable = True


def read_first_copy_outside(variable: keras.Variable) -> None:
    """Makes reads of a metric's variable outside of replica functions return its first local copy.

    tf.distribute would sum the copies of all processes, and wait for processes that do not read the variable.
    """
    value = variable._value
    if isinstance(value, values.SyncOnReadVariable):
        value._get_cross_replica = lambda: value._get_replica(0).read_value()


def assign_own_copies(variable: keras.Variable) -> None:
    """Makes each replica assign only its own copy of a mirrored variable, regardless of `aggregation`.

    tf.distribute would assign the sum, the first or the unweighted mean of the replicas' values.
    """
    value = variable._value
    if isinstance(value, values.MirroredVariable):
        value._aggregation = tf.VariableAggregation.NONE


@contextlib.contextmanager
def reading_first_copy(variables: Sequence[keras.Variable], copies: Sequence[Sequence[tf.Variable]]) -> Iterator[None]:
    """Context in which variables stand for their first copies; on exit, the other copies get the value of the first.

    `copies` are the TensorFlow variables of each variable on all devices.
    """
    first_copies = ((variable, "_value", first) for variable, (first, *_) in zip(variables, copies, strict=True))
    with patched(*first_copies):
        try:
            yield
        finally:
            for first, *other_copies in copies:
                for copy in other_copies:
                    copy.assign(first)


def own_copies(variables: Sequence[keras.Variable]) -> Context:
    """Context, inside a replica function, in which variables of tf.distribute stand for this replica's copies.

    Do not call collectives inside it: a process's replicas enter it one after another, as they share Keras's variables.
    """
    distributed = [variable for variable in variables if isinstance(variable._value, values.DistributedVariable)]
    return patched(*((variable, "_value", variable._value._get()) for variable in distributed))


def value_of(variable: keras.Variable) -> Any:
    """Returns the TensorFlow variable of a Keras variable; None if it has no value yet."""
    return variable._value


class RecordedScope(keras.StatelessScope):
    """A stateless scope that records assignments and collects the losses added by layers.

    In nested scopes, a variable without a value in the inner scope has its value in the outer scope.
    """

    def __init__(
        self,
        state_mapping: Iterable[tuple[keras.Variable, Any]],
        sources: Iterable[tuple[keras.Variable, Any]] = (),
        read: Callable[[keras.Variable], Any] = lambda variable: None,
    ):
        """Initializes the scope without entering it; `state_mapping` has pairs of a variable and its value in the scope.

        `sources` are tensors from which these values are computed, if they differ. `read` returns the value of any other
        variable; None for its own value.
        """
        super().__init__(state_mapping=list(state_mapping), collect_losses=True)
        self._read = read
        self.sources = {id(variable): value for variable, value in sources}  # by id of the variable
        self._updates: dict[int, tuple[keras.Variable, Any]] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        if value is None:
            value = self._read(variable)
        if value is None and isinstance(self.original_scope, RecordedScope):
            return self.original_scope.get_current_value(variable)
        return value

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        super().add_update(update)
        self._updates[id(update[0])] = update
        self.sources.pop(id(update[0]), None)

    @property
    def assignments(self) -> list[tuple[keras.Variable, Any]]:
        """Pairs of each variable that was assigned in the scope and its latest value, in the order of first assignment."""
        return list(self._updates.values())


def source_value(variable: keras.Variable) -> tf.Tensor:
    """Returns the source of a variable's value in the innermost `RecordedScope`, or the value if it has no source."""
    scope = get_stateless_scope()
    if isinstance(scope, RecordedScope) and id(variable) in scope.sources:
        return scope.sources[id(variable)]
    return uncast_value(variable)


def uncast_value(variable: keras.Variable) -> tf.Tensor:
    """Returns a variable's value in its own dtype, even inside a mixed-precision layer."""
    with keras_variables.AutocastScope(None):
        return tf.convert_to_tensor(variable.value)


def bytes_of(variable: keras.Variable) -> int:
    """Returns the size in bytes of a variable that is not sharded."""
    return math.prod(variable.shape) * tf.as_dtype(variable.dtype).size


def layout_of(variable: keras.Variable) -> Any:
    """Returns the layout set by `set_layout`; an optimizer's variable has the layout of its model variable."""
    return variable._layout


def set_layout(variable: keras.Variable, layout: Any) -> None:
    """Attaches a layout to a variable; Keras copies it to the optimizer's variables."""
    variable._layout = layout


def _callers() -> list[Any]:
    stack = global_state.get_global_attribute("name_scope_stack") or []
    return [scope.caller for scope in stack if scope.caller is not None]


def deferred_weights(is_selected: Callable[[keras.Layer], bool] = lambda layer: True) -> Context:
    """Context in which weights of selected layers are created without values; other variables, such as seeds, get values.

    Assigning to such a weight, inside the context or later, sets its initial value.
    """
    add_weight, register = keras.Layer.add_weight, keras_variables.register_uninitialized_variable

    def defer(variable: keras.Variable, initializer: Callable[..., Any]) -> None:
        variable._value, variable._initializer = None, initializer
        variable._direct_assign = functools.partial(_assign, keras.Variable._direct_assign, variable)
        vars(variable).pop("_deferred_initialize", None)
        record_name_scope(variable)

    def defer_later(variable: keras.Variable) -> None:
        """Defers a variable that Keras would initialize after it has traced a layer to build it."""
        variable._deferred_initialize = functools.partial(defer, variable, variable._initializer)
        register(variable)

    def add_deferred_weight(self: keras.Layer, *args: Any, **kwargs: Any) -> keras.Variable:
        register_patch = (keras_variables, "register_uninitialized_variable", defer_later)
        patches = (keras.Variable, "_initialize_with_initializer", defer), register_patch
        with patched(*(patches if is_selected(self) else ())):
            return add_weight(self, *args, **kwargs)

    return patched((keras.Layer, "add_weight", add_deferred_weight))


def _assign(assign: Callable[..., None], variable: keras.Variable, value: Any) -> None:
    if variable._value is not None:
        assign(variable, value)
    elif not isinstance(variable._initializer, _RejectingInitializer):
        initial = tf.cast(value, variable.dtype)
        variable._initializer = lambda *_, **__: initial


def without_call_context(error: Exception) -> Exception:
    """Prevents Keras from adding the arguments of a layer's call to an error."""
    error._keras_call_info_injected = True  # type: ignore[attr-defined]
    return error


@functools.cache
def reject_training(message: str) -> None:
    """Makes Keras's own training raise `InputError` if a weight from `deferred_weights` has no value.

    `{path}` in `message` is replaced with the path of the weight.
    """
    make_function = keras.Model.make_train_function

    @functools.wraps(make_function)
    def checked_make(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        for variable in self.trainable_variables:
            if variable._value is None and "_direct_assign" in vars(variable):  # created by `deferred_weights`
                raise InputError(message.format(path=variable.path))
        return make_function(self, *args, **kwargs)

    keras.Model.make_train_function = checked_make


class _RejectingInitializer(NamedTuple):
    message: str

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise without_call_context(InputError(self.message))


def reject_reads(variables: Sequence[keras.Variable], message: str) -> None:
    """Makes variables without values raise `InputError` when they are read, and ignore assignments."""
    for variable in variables:
        if variable._value is None:
            variable._initializer = _RejectingInitializer(message)


def replace_reads(variables: Sequence[keras.Variable], read: Callable[[keras.Variable], Any]) -> Context:
    """Context in which reading a variable without a value returns the result of `read`."""
    return patched(*((v, "_initializer", lambda *_, variable=v, **__: read(variable)) for v in variables))
