"""Every private corner of Keras and TensorFlow that is touched, in one place; tests/keras_internals_test.py pins each."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask, set_keras_mask
from keras.src.backend.common import global_state, remat
from keras.src.backend.common import variables as keras_variables
from keras.src.backend.tensorflow import optimizer as tf_optimizer
from keras.src.losses.loss import apply_mask, reduce_weighted_values
from keras.src.optimizers import base_optimizer
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.eager import context

from tfdist.errors import InputError


def build(model: keras.Model, batch: Any) -> None:
    """Creates every variable of a compiled model: weights, metrics, the loss's trackers and the optimizer's slots.

    Args:
      model: a compiled model.
      batch: a structure (x, y) or (x, y, sample_weight) of `tf.TensorSpec` with the batch's dim first.
    """
    try:
        model._symbolic_build(data_batch=batch)
    except RuntimeError as error:
        if error.__context__ is None:
            raise
        raise error.__context__ from None  # which Keras hides behind advice that is of no use here


def limit_start_of_workers(workers: int, seconds: float) -> None:
    """Makes TensorFlow's servers of a job, of which this process will start one, give up waiting for each other.

    By itself `MultiWorkerMirroredStrategy` waits without end for a process that died before its own server was up, in
    a call that holds Python's lock: no thread runs, and no signal is handled. Afterwards it raises a
    `DeadlineExceededError`.

    Args:
      workers: how many servers there will be; task 0 of the job `worker` coordinates them.
      seconds: until all must be up, from when this one is.
    """
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        cluster_register_timeout_in_ms=int(1000 * seconds),
        coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=workers)],
    )
    context.context().coordination_service.cluster_register_with_barrier = True


@contextlib.contextmanager
def untuned_device_iterators() -> Iterator[None]:
    """Iterators over distributed data sets that are made inside end at once.

    tf.distribute puts a data set of its own on each device, which has a thread that tunes its buffer of one element and
    sleeps for up to a minute; an iterator's end waits until it wakes. No public option reaches these data sets.
    """
    make = multi_device_iterator_ops._create_device_dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    multi_device_iterator_ops._create_device_dataset = lambda *args: make(*args).with_options(options)
    try:
        yield
    finally:
        multi_device_iterator_ops._create_device_dataset = make


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


@contextlib.contextmanager
def not_compiled(model: keras.Model) -> Iterator[keras.Model]:
    """The model as if it had not been compiled: what is saved inside needs no optimizer to be loaded."""
    compiled, model.compiled = model.compiled, False
    try:
        yield model
    finally:
        model.compiled = compiled


class FlatLoss(NamedTuple):
    """One of the losses that a model was compiled with: where its output is, the function, its weight."""

    path: tuple[Any, ...]
    loss: keras.Loss
    weight: float | None


def flat_losses(model: keras.Model) -> list[FlatLoss]:
    """The losses of a compiled and built model, one for each output that has one."""
    if model._compile_loss is None:
        return []
    return [FlatLoss(flat.path, flat.loss, flat.loss_weights) for flat in model._compile_loss._flat_losses]


def matched(model: keras.Model, y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    """Labels and outputs in the structures to which the paths of `flat_losses` belong."""
    compiled = model._compile_loss
    y_pred = keras.tree.pack_sequence_as(compiled._y_pred_build_structure, keras.tree.flatten(y_pred))
    y_true = keras.tree.pack_sequence_as(compiled._y_true_build_structure, keras.tree.flatten(y_true))
    return y_true, y_pred


def loss_values(loss: keras.Loss, y_true: Any, y_pred: Any) -> tuple[tf.Tensor, tf.Tensor | None]:
    """A loss before its reduction, as `Loss.__call__` computes it, and the mask that goes with it."""
    if type(loss).__call__ is not keras.Loss.__call__:
        raise InputError(
            f"A loss must define `call`, so that it can be reduced over replicas. Received: {type(loss).__name__}, which "
            "overrides `__call__`. Move its computation to `call` and return one value for each example."
        )
    in_mask = get_keras_mask(y_pred)
    y_pred = keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype), y_pred)
    y_true = keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype), y_true)
    values = loss.call(y_true, y_pred)
    masks = [mask for mask in (in_mask, get_keras_mask(values)) if mask is not None]
    return values, (masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None)


def with_mask_of(tensor: tf.Tensor, other: tf.Tensor, place: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """A tensor with the mask of another one, if that has one, put through `place`."""
    mask = get_keras_mask(other)
    if mask is not None:
        set_keras_mask(tensor, place(mask))
    return tensor


def weighted_sum(values: tf.Tensor, sample_weight: Any, mask: tf.Tensor | None, dtype: str) -> tf.Tensor:
    """The sum of values times weights times mask, with Keras's broadcasting."""
    return reduce_weighted_values(values, sample_weight, mask, reduction="sum", dtype=dtype)


def sum_of_weights(sample_weight: Any, mask: tf.Tensor | None, dtype: str) -> tf.Tensor:
    """The sum of weights times mask, with Keras's broadcasting; one of the two is not None."""
    return keras.ops.sum(apply_mask(sample_weight, mask, dtype=dtype, reduction="sum"))


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """Every layer of a model, at any depth, without the model itself."""
    return list(model._flatten_layers(include_self=False))


def has_shapes(layer: keras.Layer) -> bool:
    """Whether a layer's `input` and `output` are known: it is a node of a functional or sequential model, and once."""
    return len(layer._inbound_nodes) == 1


def embeddings(model: keras.Model) -> list[keras.Variable]:
    """The variables of which a step uses some rows alone, so that their gradients may be `tf.IndexedSlices`."""
    return [layer._embeddings for layer in layers_of(model) if isinstance(layer, keras.layers.Embedding)]


def weight_losses(model: keras.Model) -> list[tf.Tensor]:
    """The regularisation of a model's weights: the same on every replica."""
    return model._get_regularization_losses()


def data_losses(model: keras.Model) -> list[tf.Tensor]:
    """What `add_loss` and activity regularisers left in the last forward pass: means over the replica's rows."""
    return [loss for layer in model._flatten_layers() for loss in layer._get_own_losses()]


def metrics_of(model: keras.Model) -> list[keras.Metric]:
    """The metrics that a compiled and built model updates from labels and outputs, without its loss trackers."""
    return model._compile_metrics.metrics if model._compile_metrics is not None else []


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables of the metrics that a compiled and built model updates from labels and outputs."""
    return list(model._compile_metrics.variables) if model._compile_metrics is not None else []


def moving_statistics(model: keras.Model) -> list[keras.Variable]:
    """The floating variables that a forward pass may change, such as the moving mean of BatchNormalization."""
    return [v for v in model.non_trainable_variables if v.trainable is False and tf.as_dtype(v.dtype).is_floating]


def update_metrics(model: keras.Model, y_true: Any, y_pred: Any, sample_weight: Any) -> None:
    """Updates the compiled metrics with one batch."""
    if model._compile_metrics is not None:
        model._compile_metrics.update_state(y_true, y_pred, sample_weight)


def metric_results(model: keras.Model, values: Sequence[Any]) -> dict[str, Any]:
    """The compiled metrics' results, by their names in Keras's logs, for the given values of their variables."""
    if model._compile_metrics is None:
        return {}
    variables = model._compile_metrics.variables
    with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
        return keras.tree.map_structure(float, model._compile_metrics.result())


def slots_of(optimizer: keras.Optimizer, variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """What an optimizer would keep for variables that have no values; nothing is computed."""
    unborn: list[Newborn] = []
    with tf.Graph().as_default(), births_deferred(unborn, unborn.append):
        tf_optimizer.TFOptimizer._var_key = lambda self, variable: id(variable)  # which that restores at its end
        optimizer.build(list(variables))
    return [newborn.variable for newborn in unborn]


def operations_of(graph: tf.Graph) -> Iterator[tf.Operation]:
    """Every operation of a graph, those inside its loops, branches and functions among them."""
    yield from graph.get_operations()
    for function in graph._functions.values():
        yield from operations_of(function.graph)


class Newborn(NamedTuple):
    """A variable that has an initializer and no value yet, and the layers in whose methods it was made, innermost last."""

    variable: keras.Variable
    owners: list[Any]


@contextlib.contextmanager
def births_deferred(unborn: list[Newborn], bear: Callable[[Newborn], None]) -> Iterator[None]:
    """Inside, variables that have initializers get no value: who opened this gives them one with `give_value`.

    Read, such a variable is what its initializer says; assigned to, it begins with that.

    Args:
      unborn: gets each such variable.
      bear: called for a variable that Keras made while it traced a model and wants to have now.
    """
    kind, optimizers = keras.Variable, tf_optimizer.TFOptimizer
    initialize, assign, register, key = (
        kind._initialize_with_initializer,
        kind._direct_assign,
        keras_variables.register_uninitialized_variable,
        optimizers._var_key,
    )
    traced: dict[int, Newborn] = {}

    def defer(variable: keras.Variable, initializer: Callable[..., Any]) -> None:
        variable._initializer = initializer
        if id(variable) in traced:
            bear(traced.pop(id(variable)))
        else:
            variable._value = None
            unborn.append(Newborn(variable, _callers()))

    def note(variable: keras.Variable) -> None:
        traced[id(variable)] = Newborn(variable, _callers())
        register(variable)

    def assign_to(variable: keras.Variable, value: Any) -> None:
        if variable._value is not None:
            assign(variable, value)
        else:
            given = tf.cast(value, variable.dtype)
            variable._initializer = lambda *_, **__: given

    def key_of(optimizer: keras.Optimizer, variable: keras.Variable) -> Any:
        for i, newborn in enumerate(unborn):  # an optimizer that is built here wants the variable as it will be
            if newborn.variable is variable:
                bear(unborn.pop(i))
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


def value_of(variable: keras.Variable) -> Any:
    """TensorFlow's variable that Keras's stands for; None as long as it has none."""
    return variable._value


class RecordedScope(keras.StatelessScope):
    """A scope that knows what was assigned inside, and keeps the losses that layers add.

    Attributes:
      assigned: variable and value, in the order of the last assignments; what the scope was given is not among them.
    """

    def __init__(self, state_mapping: Sequence[tuple[keras.Variable, Any]]):
        """Args: state_mapping: values of variables inside."""
        super().__init__(state_mapping=state_mapping, collect_losses=True)
        self._updates: dict[int, tuple[keras.Variable, Any]] = {}

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """See base class."""
        super().add_update(update)
        self._updates[id(update[0])] = update

    @property
    def assigned(self) -> list[tuple[keras.Variable, Any]]:
        """See the class."""
        return list(self._updates.values())


def uncast_value(variable: keras.Variable) -> tf.Tensor:
    """A variable's value in its own dtype, also where a layer of mixed precision computes."""
    with keras_variables.AutocastScope(None):
        return tf.convert_to_tensor(variable.value)


def same_call_again(layer: keras.Layer) -> Callable[[], contextlib.AbstractContextManager]:
    """Makes what surrounds a layer's `call` now, so that it can be called so once more: its dtype, whether it trains."""
    context, dtype = global_state.get_global_attribute("current_call_ctx"), layer.compute_dtype

    @contextlib.contextmanager
    def surroundings() -> Iterator[None]:
        now = global_state.get_global_attribute("current_call_ctx")
        global_state.set_global_attribute("current_call_ctx", context)
        try:
            with keras_variables.AutocastScope(dtype if layer.autocast else None):
                yield
        finally:
            global_state.set_global_attribute("current_call_ctx", now)

    return surroundings


def mask_of(tensor: Any) -> tf.Tensor | None:
    """The mask that travels with a tensor, if one does."""
    return get_keras_mask(tensor)


def layout_of(variable: keras.Variable) -> Any:
    """What `set_layout` said; an optimizer's slot has its variable's."""
    return variable._layout


def set_layout(variable: keras.Variable, layout: Any) -> None:
    """Keeps a layout with a variable. Keras hands it on to the optimizer's slots."""
    variable._layout = layout


def _callers() -> list[Any]:
    stack = global_state.get_global_attribute("name_scope_stack") or []
    return [scope.caller for scope in stack if scope.caller is not None]


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


def wrap_call(layer: keras.Layer, wrap: Callable[[keras.Layer, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Puts `wrap(layer, layer.call)` in the place of a layer's `call`, as Keras does for its own rematerialization."""
    layer._remat_mode = remat.RematMode("full", 0, [])
    layer.rematerialized_call = lambda call, *_, **__: wrap(layer, call)
