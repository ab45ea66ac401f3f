"""Metrics of Keras models: compiled metrics, and metrics that are updated by calls of the model."""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.errors import InputError
from tfdist.keras_internals.fitting import loss_means
from tfdist.keras_internals.models import compiled_metrics, is_user_defined, layers_of, wrapped_function


def metrics_of(model: keras.Model) -> list[keras.Metric]:
    """Returns the metrics of a compiled and built model, compiled or updated by its calls, without loss trackers."""
    return [metric for _, metric in named_metrics(model)]


def named_metrics(model: keras.Model) -> list[tuple[str, keras.Metric]]:
    """Returns `metrics_of`, by their names in logs."""
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
    """Returns the metrics that calls of the model and of layers update, by their names in logs.

    The model may override its property `metrics`; the model's metrics are those that were not added by Keras or a layer.
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

    The metrics of a layer have its name as a prefix. An element of a vector has the metric's name and its index. A result with
    more dims raises `InputError`.
    """
    results: dict[str, Any] = {}
    with keras.StatelessScope(state_mapping=list(zip(metric_variables(model), values, strict=True))):
        if model._compile_metrics is not None:
            for name, result in model._compile_metrics.result().items():
                results |= by_name(name, result)
        for full_name, metric in metrics_updated_by_calls(model):
            prefix = full_name.removesuffix(metric.name)
            results |= {f"{prefix}{name}": value for name, value in by_name(metric.name, metric.result()).items()}
        # In the scope, because a result may be a variable.
        return {name: value for key, result in results.items() for name, value in _numbers(key, np.asarray(result))}


def by_name(name: str, result: Any) -> dict[str, Any]:
    """Returns a metric's result by name in logs: a dict is returned unchanged, other results get the metric's name."""
    return result if isinstance(result, dict) else {name: result}


def _numbers(name: str, result: np.ndarray) -> Iterator[tuple[str, float]]:
    """Yields the numbers of a metric's result with their names in logs."""
    if result.size == 1:
        yield name, float(result.item())
        return
    if result.ndim > 1:
        raise InputError(
            f"A metric's result must be a number, a vector, or a dict of them. Received: {name} with the shape "
            f"{list(result.shape)}. Return a dict with a name for each number."
        )
    yield from ((f"{name}_{i}", float(x)) for i, x in enumerate(result))
