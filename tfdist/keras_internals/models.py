"""Accesses internals of Keras's models: compiled losses, layers, and metrics that are compiled or updated by calls."""

import contextvars
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend import compute_output_spec, get_keras_mask
from keras.src.losses import loss as keras_loss
from keras.src.losses.loss import apply_mask, reduce_weighted_values
from keras.src.saving import saving_lib

from tfdist.errors import InputError
from tfdist.keras_internals.fitting import loss_means
from tfdist.keras_internals.layers import keep_losses_by_replica
from tfdist.keras_internals.patching import Context, context_value, patched


def weights_in_file() -> Context:
    """Context in which Keras saves weights one at a time, through a temporary file.

    Otherwise, Keras keeps a copy of all weights in memory if the host has enough of it, regardless of the memory limit of the
    process. An array, which may be a memory-mapped file, is not copied.
    """
    keras_backend = saving_lib.backend
    convert = keras_backend.convert_to_numpy

    def convert_variable(x: Any) -> Any:
        is_remote = isinstance(x, keras.Variable) and not isinstance(x._value, tf.Variable | None)
        value = x._value.numpy() if is_remote else x
        return value if isinstance(value, np.ndarray) else convert(value)

    return patched(
        (saving_lib, "is_memory_sufficient", lambda model: False), (keras_backend, "convert_to_numpy", convert_variable)
    )


_has_one_device_losses: contextvars.ContextVar[bool] = contextvars.ContextVar("losses as on one device", default=False)

_TRUSTED_PACKAGES = ("keras", "tfdist")  # packages whose code is not user-defined


def one_device_losses() -> Context:
    """Context in which losses are not scaled; otherwise, Keras divides means by the number of replicas under tf.distribute."""
    _wrap_scaling()
    keep_losses_by_replica()
    return context_value(_has_one_device_losses, True)


@functools.cache
def _wrap_scaling() -> None:
    def scale_unless_one_device(scale: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda value: value if _has_one_device_losses.get() else scale(value)

    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        setattr(keras_loss, name, scale_unless_one_device(getattr(keras_loss, name)))


def build(model: keras.Model, batch: Any) -> None:
    """Creates every variable of a compiled model: weights, metrics, loss trackers and the optimizer's variables.

    `batch` is a structure (x, y) or (x, y, sample_weight) of `tf.TensorSpec`, with a batch dim.
    """
    try:
        model._symbolic_build(data_batch=batch)
    except RuntimeError as error:
        if error.__context__ is None:
            raise
        raise error.__context__ from None  # Keras's own message hides the cause


def check_fits(model: keras.Model, batch: Any) -> None:
    """Calls a built model and its losses symbolically; Keras raises an error if `batch` (see `build`) does not fit."""
    symbolic = keras.tree.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), batch)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(symbolic)
    outputs = compute_output_spec(model, x, training=False)
    if model._compile_loss is not None:  # otherwise layers add the loss
        compute_output_spec(model._compute_loss, x, y, outputs, weight, training=False)


class FlatLoss(NamedTuple):
    """A compiled loss."""

    path: tuple[Any, ...]  # path of its output in the structure of the model's outputs
    loss: keras.Loss
    weight: float | None


def flat_losses(model: keras.Model) -> list[FlatLoss]:
    """Returns the losses of a compiled and built model, one per output that has a loss."""
    if model._compile_loss is None:
        return []
    return [FlatLoss(flat.path, flat.loss, flat.loss_weights) for flat in model._compile_loss._flat_losses or ()]


def is_overridden(model: keras.Model, name: str) -> bool:
    """Returns whether a model overrides a method of `keras.Model`, in its class or as an attribute."""
    return getattr(type(model), name) is not getattr(keras.Model, name) or name in model.__dict__


def is_user_defined(part: Any) -> bool:
    """Returns whether a layer, function or other object is defined neither by Keras nor by tfdist."""
    if isinstance(part, keras.layers.Lambda):
        return True  # it calls a user's function
    kind = part if hasattr(part, "__name__") else type(part)
    return getattr(kind, "__module__", "").partition(".")[0] not in _TRUSTED_PACKAGES


def depends_on_training(model: keras.Model) -> bool:
    """Returns whether a model may combine rows differently in training than in inference: in user-defined or image layers."""
    layers = model._flatten_layers()
    return any(is_user_defined(layer) or ".image_preprocessing." in type(layer).__module__ for layer in layers)


def compiled_metrics(model: keras.Model) -> list[keras.Metric]:
    """Returns the compiled metrics; an empty list for a model that is not compiled or not built."""
    return model._compile_metrics.metrics if model._compile_metrics is not None else []


def wrapped_function(part: Any) -> Any:
    """Returns the function that a Keras loss or metric wraps; returns other objects unchanged."""
    candidates = (getattr(part, name, None) for name in ("fn", "_fn"))
    return next((function for function in candidates if hasattr(function, "__name__")), part)


def loss_form(loss: Any) -> tuple[str, dict[str, Any]]:
    """Returns the name and the explicit arguments of a Keras loss; an empty name for other losses.

    `loss` is an object, a function, or a name that Keras resolves independently of the shapes of labels.
    """
    function = getattr(keras.losses, loss, None) if isinstance(loss, str) else wrapped_function(loss)
    if not getattr(function, "__module__", "").startswith("keras."):
        return "", {}
    return getattr(function, "__name__", ""), dict(getattr(loss, "_fn_kwargs", {}))


def last_activation(output: keras.KerasTensor) -> str | None:
    """Returns the name of the activation of an output of a functional model; None if unknown."""
    operation = output._keras_history.operation
    if isinstance(operation, keras.Model):
        inner_outputs = getattr(operation, "outputs", None) or []
        return last_activation(inner_outputs[0]) if len(inner_outputs) == 1 else None
    if isinstance(operation, keras.layers.Softmax):
        return "softmax"
    return getattr(getattr(operation, "activation", None), "__name__", None)


def user_losses(model: keras.Model) -> list[Any]:
    """Returns the losses that were passed to `compile`, even before they are built; names are not resolved."""
    if model._compile_loss is None:
        return []
    return [loss for loss in keras.tree.flatten(model._compile_loss._user_loss) if loss is not None]


def build_losses(model: keras.Model, y_true: Any, y_pred: Any) -> None:
    """Builds the compiled losses for the model's outputs, as Keras does when they are first used."""
    if model._compile_loss is not None and not model._compile_loss.built:
        model._compile_loss.build(y_true, y_pred)


def match_structures(model: keras.Model, y_true: Any, y_pred: Any) -> tuple[Any, Any]:
    """Converts labels and outputs to the structures of the paths in `flat_losses`, as Keras does."""
    compiled = model._compile_loss
    outputs = keras.tree.flatten(y_pred)
    names = compiled.output_names or ()
    if isinstance(y_pred, list | tuple) and isinstance(y_true, dict) and set(names) == set(y_true):
        y_true = [y_true[name] for name in names]
    labels = keras.tree.flatten(y_true)
    losses = keras.tree.flatten(compiled._user_loss)
    if len(labels) != len(outputs) and len(labels) == sum(loss is not None for loss in losses):
        remaining = iter(labels)  # one label per output with a loss
        labels = [None if loss is None else next(remaining) for loss in losses]
    y_pred = keras.tree.pack_sequence_as(compiled._y_pred_build_structure, outputs)
    return keras.tree.pack_sequence_as(compiled._y_true_build_structure, labels), y_pred


def loss_values(loss: keras.Loss, y_true: Any, y_pred: Any) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Returns the values of a loss before its reduction, as in `Loss.__call__`, and the mask to apply; None without one."""
    if type(loss).__call__ is not keras.Loss.__call__:
        raise InputError(
            f"A loss must define `call`, so that it can be reduced over replicas. Received: {type(loss).__name__}, which "
            "overrides `__call__`. Move its computation to `call` and return one value for each example."
        )
    prediction_mask = get_keras_mask(y_pred)
    y_pred = keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype), y_pred)
    y_true = keras.tree.map_structure(lambda x: keras.ops.convert_to_tensor(x, dtype=loss.dtype), y_true)
    values = loss.call(y_true, y_pred)
    masks = [mask for mask in (prediction_mask, get_keras_mask(values)) if mask is not None]
    return values, (masks[0] & masks[1] if len(masks) == 2 else masks[0] if masks else None)


def weighted_sum(values: tf.Tensor, sample_weight: Any, mask: tf.Tensor | None, dtype: str) -> tf.Tensor:
    """Returns the sum of values times weights times mask, with Keras's broadcasting."""
    return reduce_weighted_values(values, sample_weight, mask, reduction="sum", dtype=dtype)


def sum_of_weights(sample_weight: Any, mask: tf.Tensor | None, dtype: str) -> tf.Tensor:
    """Returns the sum of weights times mask, with Keras's broadcasting; at least one of them is not None."""
    return keras.ops.sum(keras.ops.cast(apply_mask(sample_weight, mask, dtype=dtype, reduction="sum"), dtype))


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """Returns every layer of a model, at any depth, except the model itself."""
    return list(model._flatten_layers(include_self=False))


def has_shapes(layer: keras.Layer) -> bool:
    """Returns whether `input` and `output` of a layer are defined: the layer was called symbolically exactly once."""
    return len(layer._inbound_nodes) == 1


def embeddings(model: keras.Model) -> list[keras.Variable]:
    """Returns the embedding tables, whose gradients may be `tf.IndexedSlices`."""
    return [layer._embeddings for layer in layers_of(model) if isinstance(layer, keras.layers.Embedding)]


def embeddings_without_copy(model: keras.Model, kind: type) -> list[keras.layers.Embedding]:
    """Returns the embedding layers whose table either has no value yet or has a value of the type `kind`."""
    layers = [layer for layer in layers_of(model) if isinstance(layer, keras.layers.Embedding)]
    return [layer for layer in layers if isinstance(layer._embeddings._value, kind | None)]


def kernel_of(layer: keras.Layer) -> keras.Variable:
    """Returns the variable of a kernel or embedding table, without the LoRA term that the public property adds."""
    return layer._embeddings if isinstance(layer, keras.layers.Embedding) else layer._kernel


def weight_losses(model: keras.Model) -> list[tf.Tensor]:
    """Returns the regularization losses of a model's weights, which are the same on every replica."""
    return model._get_regularization_losses()


def data_losses(model: keras.Model) -> list[tf.Tensor]:
    """Returns the losses of `add_loss` and activity regularizers in the last forward pass, as means over local rows."""
    return [loss for layer in model._flatten_layers() for loss in layer._get_own_losses()]


def losses_by_layer(model: keras.Model) -> dict[str, list[tf.Tensor]]:
    """Returns the losses of `data_losses` by the path of the layer that added them."""
    return {layer.path: losses for layer in model._flatten_layers() if (losses := layer._get_own_losses())}


def pop_data_losses(layer: keras.Layer) -> list[tf.Tensor]:
    """Returns the losses of `data_losses` and removes them, as Keras does when an outermost layer is called."""
    losses = data_losses(layer)
    layer._clear_losses()
    return losses


def metrics_of(model: keras.Model) -> list[keras.Metric]:
    """Returns the metrics of a compiled and built model, whether compiled or updated by calls, except loss trackers."""
    return [metric for _, metric in named_metrics(model)]


def named_metrics(model: keras.Model) -> list[tuple[str, keras.Metric]]:
    """Returns the metrics of `metrics_of` with their names in logs."""
    return [*((metric.name, metric) for metric in compiled_metrics(model)), *metrics_updated_by_calls(model)]


def custom_metrics(model: keras.Model) -> set[int]:
    """Returns the ids of the metrics that are user-defined, call user-defined code or may combine rows."""
    return {id(metric) for metric in metrics_of(model) if is_user_defined(metric) or _may_combine_rows(metric)}


def _may_combine_rows(metric: keras.Metric) -> bool:
    """Returns whether a metric wraps a user-defined function or reduces an axis that may be the axis of the rows."""
    function = getattr(metric, "_fn", None)  # a user's callable, or a function or loss of Keras
    has_row_axis = getattr(metric, "_fn_kwargs", {}).get("axis", -1) not in (-1, [-1], (-1,))
    return function is not None and (
        is_user_defined(function) or is_user_defined(wrapped_function(function)) or has_row_axis
    )


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of `metrics_of`, in the same order."""
    return [variable for metric in metrics_of(model) for variable in metric.variables]


def metrics_of_layers(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of the metrics that layers update."""
    return [variable for layer in layers_of(model) for metric in layer._metrics for variable in metric.variables]


def metrics_updated_by_calls(model: keras.Model) -> list[tuple[str, keras.Metric]]:
    """Returns the metrics that calls of the model and of layers update, with their names in logs.

    Because a model may override `metrics`, its own metrics are those that neither Keras nor a layer has added.
    """
    layer_metrics = [(f"{layer.name}_{metric.name}", metric) for layer in layers_of(model) for metric in layer._metrics]
    compile_metrics = [*loss_means(model), model._compile_metrics, *compiled_metrics(model)]
    other_ids = {id(metric) for metric in (*compile_metrics, *(metric for _, metric in layer_metrics))}
    return [*((metric.name, metric) for metric in model.metrics if id(metric) not in other_ids), *layer_metrics]


def update_metrics(model: keras.Model, y_true: Any, y_pred: Any, sample_weight: Any) -> None:
    """Updates the compiled metrics with one batch."""
    if model._compile_metrics is not None:
        model._compile_metrics.update_state(y_true, y_pred, sample_weight)


def metric_results(model: keras.Model, values: Sequence[Any]) -> dict[str, float]:
    """Returns the results of metrics by name in logs, given values of `metric_variables`.

    Names of a layer's metrics are prefixed with the layer's name. Names of the elements of a vector are suffixed with their
    indices. A result of a higher rank raises `InputError`.
    """
    results: dict[str, Any] = {}
    with keras.StatelessScope(state_mapping=list(zip(metric_variables(model), values, strict=True))):
        if model._compile_metrics is not None:
            for name, result in model._compile_metrics.result().items():
                results |= by_name(name, result)
        for full_name, metric in metrics_updated_by_calls(model):
            prefix = full_name.removesuffix(metric.name)
            results |= {f"{prefix}{name}": value for name, value in by_name(metric.name, metric.result()).items()}
        # Converted inside the scope, because a result may be a variable.
        return {name: value for key, result in results.items() for name, value in _scalars(key, np.asarray(result))}


def by_name(name: str, result: Any) -> dict[str, Any]:
    """Returns a metric's result by name in logs: a dict is returned unchanged, other results get the metric's name."""
    return result if isinstance(result, dict) else {name: result}


def _scalars(name: str, result: np.ndarray) -> Iterator[tuple[str, float]]:
    if result.size == 1:
        yield name, float(result.item())
        return
    if result.ndim > 1:
        raise InputError(
            f"A metric's result must be a number, a vector, or a dict of them. Received: {name} with the shape "
            f"{list(result.shape)}. Return a dict with a name for each number."
        )
    yield from ((f"{name}_{i}", float(x)) for i, x in enumerate(result))
