"""Accesses internals of Keras's optimizers: updates, variables and learning rates."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.optimizers import base_optimizer

from tfdist.keras_internals.models import is_user_defined
from tfdist.keras_internals.patching import Context, patched
from tfdist.keras_internals.variables import UninitializedVariable, deferred_creation, value_of


def disable_gradient_aggregation(optimizer: keras.Optimizer) -> None:
    """Disables the summation of gradients over replicas in `apply`; Keras 3 has no public option for this."""
    optimizer._all_reduce_sum_gradients = list


def classes_overriding_apply(kind: type[keras.Optimizer]) -> list[Any]:
    """Returns the user-defined classes, among an optimizer's class and its bases, that override `apply`."""
    return [base for base in kind.__mro__ if "apply" in vars(base) and is_user_defined(base)]


def last_learning_rate(optimizer: keras.Optimizer) -> float:
    """Returns the learning rate used in the last update."""
    schedule = scheduled_learning_rate(optimizer)
    if schedule is None:
        return float(tf.convert_to_tensor(optimizer.learning_rate))
    return float(schedule(tf.maximum(tf.convert_to_tensor(optimizer.iterations) - 1, 0)))


def constant_learning_rate(optimizer: keras.Optimizer) -> float | None:
    """Returns the learning rate if it is a number; None for a schedule or another function."""
    rate = optimizer._learning_rate
    return None if callable(rate) else float(tf.convert_to_tensor(rate))


def scheduled_learning_rate(optimizer: keras.Optimizer) -> keras.optimizers.schedules.LearningRateSchedule | None:
    """Returns the learning rate schedule; None if the learning rate is not a schedule."""
    rate = optimizer._learning_rate
    return rate if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) else None


def replace_learning_rate(optimizer: keras.Optimizer, rate: Callable[[keras.Variable], tf.Tensor]) -> Context:
    """Context in which updates are traced with another learning rate, a function of `optimizer.iterations`.

    `optimizer.learning_rate` itself, which callbacks read and set, does not change. Enter the context once around all
    replicas: the threads of a mirrored strategy would exit it for each other.
    """
    return patched((optimizer, "_get_current_learning_rate", lambda: rate(optimizer.iterations)))


def scale_learning_rate(optimizer: keras.Optimizer, factor: float) -> Context:
    """Context in which updates are traced with the learning rate times a factor; see `replace_learning_rate`."""
    if factor == 1:
        return contextlib.nullcontext()
    current_rate = optimizer._get_current_learning_rate
    return replace_learning_rate(optimizer, lambda iterations: current_rate() * factor)


class _ScheduledNumber:
    """A hyperparameter of an optimizer, such as its momentum, whose value at each update comes from a schedule.

    Every replica evaluates it in its update. It is not a symbolic tensor, because Keras compares the momentum with 0 in
    Python.
    """

    def __init__(self, value: Callable[[], tf.Tensor]):
        self._value = value

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return tf.cast(self._value(), dtype) if dtype else self._value()

    def __bool__(self) -> bool:
        return True

    def __gt__(self, other: float) -> bool:
        return True

    def __mul__(self, other: tf.Tensor) -> tf.Tensor:
        return tf.cast(self._value(), other.dtype) * other

    def __sub__(self, other: float) -> tf.Tensor:
        return self._value() - other

    def __rsub__(self, other: float) -> tf.Tensor:
        return other - self._value()


def scheduled_momentum(optimizer: keras.Optimizer, update: tf.Tensor | None = None) -> Context:
    """Context in which updates are traced with the momentum of the optimizer's schedule, if it changes the momentum.

    The context replaces `momentum` if that is not 0, otherwise `beta_1`, as in PyTorch. Enter it once around all replicas.
    `update` replaces `optimizer.iterations`.
    """
    schedule: Any = scheduled_learning_rate(optimizer)
    name = "momentum" if getattr(optimizer, "momentum", 0) else "beta_1"
    if not getattr(schedule, "cycles_momentum", False) or getattr(optimizer, name, None) is None:
        return contextlib.nullcontext()
    momentum = _ScheduledNumber(lambda: schedule.momentum(optimizer.iterations if update is None else update))
    return patched((optimizer, name, momentum))


def trained_variables(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Returns the variables that an optimizer updates, in the optimizer's order."""
    return list(optimizer._trainable_variables)


def key_of(variable: keras.Variable) -> str:
    """Returns an optimizer's key for a variable; it changes when the variable is created again."""
    return tf_optimizer.TFOptimizer._var_key(None, variable)  # this method does not use its instance


def rebind_variables(optimizer: keras.Optimizer, engine: tf.distribute.Strategy, keys: Mapping[str, str]) -> None:
    """Updates an optimizer after variables have been recreated in the scope of `engine`; `keys` maps old keys to new keys."""
    optimizer._distribution_strategy = engine
    optimizer._trainable_variables_indices = {
        keys.get(key, key): index for key, index in optimizer._trainable_variables_indices.items()
    }
    if hasattr(optimizer, "_exclude_from_weight_decay"):
        optimizer._exclude_from_weight_decay = {keys.get(key, key) for key in optimizer._exclude_from_weight_decay}
    optimizer._exclude_from_weight_decay_cache = {}


def single_device_updates(*optimizers: keras.Optimizer) -> Context:
    """Context in which optimizers, and the optimizers they wrap, work as on one device in any scope."""
    optimizers += tuple(o.inner_optimizer for o in optimizers if isinstance(o, keras.optimizers.LossScaleOptimizer))
    engine = tf.distribute.get_strategy()
    return patched(*((optimizer, "_distribution_strategy", engine) for optimizer in optimizers))


def velocities_of(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Returns a built optimizer's momentum variables that accumulate learning rates times gradients; empty if it has none."""
    attributes = {keras.optimizers.RMSprop: "_momentums", keras.optimizers.SGD: "momentums"}
    names = [name for kind, name in attributes.items() if isinstance(optimizer, kind)]
    return [slot for name in names for slot in getattr(optimizer, name, []) if slot is not None]


def weight_averages(optimizer: keras.Optimizer) -> list[tuple[keras.Variable, keras.Variable]]:
    """Returns pairs of a variable and its moving average in a built optimizer; empty if `use_ema` is False."""
    if not optimizer.use_ema:
        return []
    pairs = zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
    return [(variable, average) for variable, average in pairs if average is not None]


def abstract_slots(optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Returns the variables that an optimizer would create for abstract variables, without computing their values."""
    uninitialized_variables: list[UninitializedVariable] = []
    with tf.Graph().as_default(), deferred_creation(uninitialized_variables, uninitialized_variables.append):
        tf_optimizer.TFOptimizer._var_key = lambda self, variable: id(variable)  # deferred_creation restores it on exit
        optimizer.build(list(variables))
    return [uninitialized.variable for uninitialized in uninitialized_variables]


def updating_own_copies(*patches: tuple[Any, str, Any]) -> Context:
    """Context in which optimizers assign to Keras's variables directly, without tf.distribute; see `patched`.

    In a replica function in which variables stand for the replica's copies, an update then changes only this replica.
    Variables get the names of their TensorFlow variables, by which optimizers exclude variables from weight decay.
    """
    kind, base = tf_optimizer.TFOptimizer, base_optimizer.BaseOptimizer
    names = ("assign", "assign_add", "assign_sub", "_apply_weight_decay", "_backend_update_step")
    tf_name = property(lambda variable: getattr(value_of(variable), "name", variable._name))
    return patched((keras.Variable, "name", tf_name), *((kind, name, getattr(base, name)) for name in names), *patches)


def stateless_updates() -> Context:
    """Context in which optimizers assign only to Keras's variables, for `keras.StatelessScope`."""
    variable_key = (tf_optimizer.TFOptimizer, "_var_key", lambda self, variable: value_of(variable)._unique_id)
    return updating_own_copies(variable_key)


def updating_subset(optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> Context:
    """Context in which an optimizer's `apply` updates only some of its variables.

    Clipping by the global norm, and the `apply` of a subclass, still use all of them.
    """
    ids = {id(variable) for variable in variables}
    update, clip = optimizer._backend_apply_gradients, optimizer._clip_gradients

    def update_some(gradients: Sequence[tf.Tensor], all_variables: Sequence[keras.Variable]) -> None:
        selected_pairs = [(g, v) for g, v in zip(clip(gradients), all_variables, strict=True) if id(v) in ids]
        update([g for g, _ in selected_pairs], [v for _, v in selected_pairs])

    return patched((optimizer, "_backend_apply_gradients", update_some), (optimizer, "_clip_gradients", list))


def slots(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Returns a built optimizer's floating-point state of trained variables, without averages of weights."""
    average_ids = {id(average) for _, average in weight_averages(optimizer)}
    general_ids = {id(optimizer.iterations), id(optimizer._learning_rate)}
    state = [v for v in optimizer.variables if id(v) not in average_ids | general_ids]
    return [v for v in state if tf.as_dtype(v.dtype).is_floating]


def paths_of_state(optimizer: keras.Optimizer) -> list[str]:
    """Returns unique paths of a built optimizer's variables, with the path of the trained variable.

    Keras's paths are kept if they contain the path of the trained variable. Paths of Adafactor contain only its last part, as
    in `adafactor/kernel`, and are replaced by paths such as `adafactor/dense_kernel_r`.
    """
    variables = optimizer._trainable_variables
    paths = {}
    for attribute, value in vars(optimizer).items():
        is_list = isinstance(value, list) and len(value) == len(variables)
        if not is_list or attribute in ("_variables", "_trainable_variables"):
            continue
        for slot, variable in zip(value, variables, strict=True):
            path = variable.path.replace("/", "_")
            if isinstance(slot, keras.Variable) and f"/{path}_" not in slot.path:
                paths[id(slot)] = f"{optimizer.name}/{path}_{attribute.strip('_')}"
    return [paths.get(id(variable), variable.path) for variable in optimizer.variables]


def state_starts_from_weights(optimizer: keras.Optimizer) -> bool:
    """Returns whether the initial state of an optimizer is a copy of the weights, as in schedule-free optimizers."""
    return isinstance(optimizer, getattr(keras.optimizers, "ScheduleFreeAdamW", ()))


def initial_slot_values(optimizer: keras.Optimizer) -> list[float] | None:
    """Returns the constant initial value of each of a built optimizer's `slots`.

    Returns None if an initial value is not constant, or is unknown because a user-defined optimizer has made updates.
    """
    if state_starts_from_weights(optimizer):
        return None
    if not type(optimizer).__module__.startswith(("keras.", "tfdist.")):
        return None if int(tf.convert_to_tensor(optimizer.iterations)) else _constant_values(slots(optimizer))
    initial = float(getattr(optimizer, "initial_accumulator_value", 0.0))  # of Adagrad and Ftrl
    product = getattr(optimizer, "_u_product", None)  # of Nadam
    return [
        initial if "accumulator" in variable.path else 1.0 if variable is product else 0.0
        for variable in slots(optimizer)
    ]


def _constant_values(variables: Sequence[keras.Variable]) -> list[float] | None:
    """Returns the value of each variable whose elements are all equal; None if the elements of a variable differ."""
    tensors = [tf.convert_to_tensor(variable.value) for variable in variables]
    minima = [float(tf.reduce_min(tensor)) for tensor in tensors]
    return minima if minima == [float(tf.reduce_max(tensor)) for tensor in tensors] else None


class _ObservedList(list):
    """A list of variables that reports the current index of a loop over it, to attribute the state created in the loop."""

    def __init__(self, variables: Sequence[keras.Variable], on_index: Callable[[int | None], None]):
        super().__init__(variables)
        self._on_index = on_index

    def __iter__(self) -> Iterator[Any]:
        for index, variable in enumerate(super().__iter__()):
            self._on_index(index)
            yield variable
        self._on_index(None)


def build_partially(
    optimizer: keras.Optimizer, variables: Sequence[keras.Variable], selected: Collection[int]
) -> dict[int, int]:
    """Builds an optimizer for variables, but initializes only the state of variables whose indices are in `selected`.

    The optimizer's variables have the same names, shapes and order as after a complete build. State that belongs to no
    variable is also initialized. Call this outside of scopes of tf.distribute, because the variables belong to this process.
    Returns the index of the trained variable to which each of the optimizer's variables belongs, by the latter's `id`.
    """
    kind = keras.Variable
    current: list[int | None] = [None]
    owner_indices: dict[int, int] = {}
    initialize = kind._initialize_with_initializer

    def on_index(index: int | None) -> None:
        current[0] = index

    def initialize_selected(variable: keras.Variable, initializer: Callable[..., Any]) -> None:
        if current[0] is not None:
            owner_indices[id(variable)] = current[0]
        if current[0] is None or current[0] in selected:
            initialize(variable, initializer)
        else:
            variable._value, variable._initializer = None, initializer

    with patched((kind, "_initialize_with_initializer", initialize_selected)), single_device_updates(optimizer):
        optimizer.build(_ObservedList(variables, on_index))
    return owner_indices


def slot_owners(
    optimizer: keras.Optimizer, variables: Sequence[keras.Variable], selected: Collection[int]
) -> list[int | None]:
    """Returns, for each of an optimizer's variables, the index of the trained variable to which it belongs, or None.

    Builds the optimizer if it is not built; see `build_partially`.
    """
    twin = type(optimizer).from_config(optimizer.get_config()) if optimizer.built else optimizer
    owner_indices = build_partially(twin, variables, () if optimizer.built else selected)
    return [owner_indices.get(id(variable)) for variable in twin.variables]


def variable_at(path: str, value: np.ndarray) -> keras.Variable:
    """Creates a trainable variable with the given path, like a layer's variable in a model."""
    *scopes, name = path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.src.backend.name_scope(scope, deduplicate=False))
        return keras.Variable(value, dtype=value.dtype.name, name=name)


def values_replaced(variables: Sequence[keras.Variable], values: Sequence[tf.Variable]) -> Context:
    """Context in which Keras variables stand for other TensorFlow variables, of any shapes."""
    return patched(*((variable, "_value", value) for variable, value in zip(variables, values, strict=True)))


@contextlib.contextmanager
def averaging_subset(optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Context in which an optimizer with `use_ema` averages only some of its variables."""
    if not optimizer.use_ema:
        yield
        return
    attributes = vars(optimizer)  # setting an attribute would track the list
    originals = {name: attributes[name] for name in ("_trainable_variables", "_model_variables_moving_average")}
    averages = {id(v): average for v, average in zip(*originals.values(), strict=True)}
    attributes["_trainable_variables"] = list(variables)
    attributes["_model_variables_moving_average"] = [averages[id(variable)] for variable in variables]
    try:
        yield
    finally:
        attributes.update(originals)
