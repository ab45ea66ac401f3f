"""Keras's models: what they were compiled with, their losses and metrics."""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.backend import get_keras_mask
from keras.src.losses import loss as keras_loss
from keras.src.losses.loss import apply_mask, reduce_weighted_values

from tfdist.errors import InputError
from tfdist.keras_internals.layers import keep_losses_by_replica

_one_device: contextvars.ContextVar[bool] = contextvars.ContextVar("losses as on one device", default=False)


@contextlib.contextmanager
def one_device_losses() -> Iterator[None]:
    """Inside, losses are those of one device: under tf.distribute Keras divides each mean by the number of replicas."""
    _watch_scaling()
    keep_losses_by_replica()
    token = _one_device.set(True)
    try:
        yield
    finally:
        _one_device.reset(token)


@functools.cache
def _watch_scaling() -> None:
    def unless_one_device(scale: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda value: value if _one_device.get() else scale(value)

    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        setattr(keras_loss, name, unless_one_device(getattr(keras_loss, name)))


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


def compiled_functions(model: keras.Model) -> list[Any]:
    """What a model was compiled with that computes losses and metrics: functions and objects, Keras's own among them."""
    losses = keras.tree.flatten(model._compile_loss._user_loss) if model._compile_loss is not None else []
    parts = [*losses, *model.metrics, *_compiled_metrics(model)]
    named = [part for part in parts if part is not None and not isinstance(part, str)]
    return [_function_of(part) for part in named]


def _function_of(part: Any) -> Any:
    """What a loss or metric of Keras wraps; else itself, whatever it may call `fn`."""
    wrapped = (getattr(part, name, None) for name in ("fn", "_fn"))
    return next((function for function in wrapped if hasattr(function, "__name__")), part)


def build_losses(model: keras.Model, y_true: Any, y_pred: Any) -> None:
    """Finds the losses of a compiled model for its outputs, as Keras does when it computes them first."""
    if model._compile_loss is not None and not model._compile_loss.built:
        model._compile_loss.build(y_true, y_pred)


def matched(model: keras.Model, y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    """Labels and outputs in the structures to which the paths of `flat_losses` belong, as Keras brings them there."""
    compiled = model._compile_loss
    outputs = keras.tree.flatten(y_pred)
    if (
        isinstance(y_pred, list | tuple)
        and isinstance(y_true, dict)
        and set(compiled.output_names or ()) == set(y_true)
    ):
        y_true = [y_true[name] for name in compiled.output_names]
    labels = keras.tree.flatten(y_true)
    wanted = keras.tree.flatten(compiled._user_loss)
    if len(labels) != len(outputs) and len(labels) == sum(loss is not None for loss in wanted):
        remaining = iter(labels)  # labels are given where there is a loss
        labels = [None if loss is None else next(remaining) for loss in wanted]
    y_pred = keras.tree.pack_sequence_as(compiled._y_pred_build_structure, outputs)
    return keras.tree.pack_sequence_as(compiled._y_true_build_structure, labels), y_pred


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


def weighted_sum(values: tf.Tensor, sample_weight: Any, mask: tf.Tensor | None, dtype: str) -> tf.Tensor:
    """The sum of values times weights times mask, with Keras's broadcasting."""
    # Of no rows Keras returns the values themselves.
    return tf.reduce_sum(reduce_weighted_values(values, sample_weight, mask, reduction="sum", dtype=dtype))


def sum_of_weights(sample_weight: Any, mask: tf.Tensor | None, dtype: str) -> tf.Tensor:
    """The sum of weights times mask, with Keras's broadcasting; one of the two is not None."""
    return keras.ops.sum(apply_mask(sample_weight, mask, dtype=dtype, reduction="sum"))


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """Every layer of a model, at any depth, without the model itself."""
    return list(model._flatten_layers(include_self=False))


def operations_beside_layers(layer: keras.Layer) -> list[keras.Operation]:
    """What a functional model computes by `keras.ops` or operators between its layers."""
    return [operation for operation in getattr(layer, "operations", ()) if not isinstance(operation, keras.Layer)]


def has_shapes(layer: keras.Layer) -> bool:
    """Whether a layer's `input` and `output` are known: it is a node of a functional or sequential model, and once."""
    return len(layer._inbound_nodes) == 1


def embeddings(model: keras.Model) -> list[keras.Variable]:
    """The variables of which a step uses some rows alone, so that their gradients may be `tf.IndexedSlices`."""
    return [layer._embeddings for layer in layers_of(model) if isinstance(layer, keras.layers.Embedding)]


def kernel_of(layer: keras.Layer) -> keras.Variable:
    """The variable behind the kernel of a dense layer, or behind the table of an embedding; LoRA adds to what it is read as."""
    return layer._embeddings if isinstance(layer, keras.layers.Embedding) else layer._kernel


def weight_losses(model: keras.Model) -> list[tf.Tensor]:
    """The regularisation of a model's weights: the same on every replica."""
    return model._get_regularization_losses()


def data_losses(model: keras.Model) -> list[tf.Tensor]:
    """What `add_loss` and activity regularisers left in the last forward pass: means over the replica's rows."""
    return [loss for layer in model._flatten_layers() for loss in layer._get_own_losses()]


def metrics_of(model: keras.Model) -> list[keras.Metric]:
    """The metrics of a compiled and built model, without its loss trackers: compiled ones, and those that layers update."""
    return [*_compiled_metrics(model), *(metric for _, metric in _metrics_of_layers(model))]


def names_of_compiled_metrics(model: keras.Model) -> list[str]:
    """Names that the model was compiled with; with several outputs they are logged with the outputs' names first."""
    return [metric.name for metric in _compiled_metrics(model)]


def _compiled_metrics(model: keras.Model) -> list[keras.Metric]:
    return model._compile_metrics.metrics if model._compile_metrics is not None else []


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """The variables of these metrics, in their order."""
    return [variable for metric in metrics_of(model) for variable in metric.variables]


def names_of_layers_metrics(model: keras.Model) -> list[str]:
    """The names of the metrics that layers update, with those of the layers first, as they are logged."""
    return [f"{layer}_{metric.name}" for layer, metric in _metrics_of_layers(model)]


def _metrics_of_layers(model: keras.Model) -> list[tuple[str, keras.Metric]]:
    return [(layer.name, metric) for layer in layers_of(model) for metric in layer._metrics]


def moving_statistics(model: keras.Model) -> list[keras.Variable]:
    """The floating variables that a forward pass may change, such as the moving mean of BatchNormalization."""
    return [v for v in model.non_trainable_variables if v.trainable is False and tf.as_dtype(v.dtype).is_floating]


def update_metrics(model: keras.Model, y_true: Any, y_pred: Any, sample_weight: Any) -> None:
    """Updates the compiled metrics with one batch."""
    if model._compile_metrics is not None:
        model._compile_metrics.update_state(y_true, y_pred, sample_weight)


def metric_results(model: keras.Model, values: Sequence[Any]) -> dict[str, Any]:
    """The metrics' results by their names in logs, for the given values of their variables; a layer's have its name first."""
    results: dict[str, Any] = {}
    with keras.StatelessScope(state_mapping=list(zip(metric_variables(model), values, strict=True))):
        if model._compile_metrics is not None:
            results |= model._compile_metrics.result()
        for layer, metric in _metrics_of_layers(model):
            found = metric.result()
            named = found if isinstance(found, dict) else {metric.name: found}
            results |= {f"{layer}_{name}": value for name, value in named.items()}
    return keras.tree.map_structure(float, results)
