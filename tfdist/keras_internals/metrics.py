"""Metrics of Keras models: the compiled ones, and those that calls of the model update."""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np

from tfdist.errors import InputError
from tfdist.keras_internals.models import compiled_metrics, is_user_defined, layers_of, wrapped_function


def metrics_of(model: keras.Model) -> list[keras.Metric]:
    """Returns the metrics of a compiled and built model, compiled or updated by its calls; without the loss trackers."""
    return [*compiled_metrics(model), *(metric for _, metric in _updated_by_calls(model))]


def own_compiled_metrics(model: keras.Model) -> list[keras.Metric]:
    """Returns the compiled metrics that are user-defined, call user-defined functions, or may combine rows."""
    return [metric for metric in compiled_metrics(model) if is_user_defined(metric) or _may_combine_rows(metric)]


def _may_combine_rows(metric: keras.Metric) -> bool:
    """Returns whether a metric wraps a user-defined function, or has an axis, other than the last, that may be that of rows."""
    function = getattr(metric, "_fn", None)  # of a user, any callable; of Keras, a function or a loss
    is_of_rows = getattr(metric, "_fn_kwargs", {}).get("axis", -1) not in (-1, [-1], (-1,))
    return function is not None and (
        is_user_defined(function) or is_user_defined(wrapped_function(function)) or is_of_rows
    )


def metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of `metrics_of`, in the same order."""
    return [variable for metric in metrics_of(model) for variable in metric.variables]


def metrics_of_layers(model: keras.Model) -> list[keras.Variable]:
    """Returns the variables of the metrics that layers update."""
    return [variable for _, metric in _metrics_of_layers(model) for variable in metric.variables]


def metrics_updated_by_calls(model: keras.Model) -> list[tuple[str, keras.Metric]]:
    """Returns the model's own metrics and those of layers, with their names in logs; a layer's name is a prefix."""
    return [(f"{prefix}{metric.name}", metric) for prefix, metric in _updated_by_calls(model)]


def _updated_by_calls(model: keras.Model) -> list[tuple[str, keras.Metric]]:
    """Returns the metrics that a call of the model updates, with the prefixes of their names in logs.

    The model's own are those in its property `metrics`, which it may override, that neither Keras nor a layer has added.
    """
    of_layers = _metrics_of_layers(model)
    of_compile = [model._loss_tracker, model._compile_metrics, *compiled_metrics(model)]
    of_losses = model._compile_loss.metrics if model._compile_loss is not None else []
    others = {id(metric) for metric in (*of_compile, *of_losses, *(metric for _, metric in of_layers))}
    own = [("", metric) for metric in model.metrics if id(metric) not in others]
    return [*own, *((f"{layer}_", metric) for layer, metric in of_layers)]


def _metrics_of_layers(model: keras.Model) -> list[tuple[str, keras.Metric]]:
    return [(layer.name, metric) for layer in layers_of(model) for metric in layer._metrics]


def update_metrics(model: keras.Model, y_true: Any, y_pred: Any, sample_weight: Any) -> None:
    """Updates the compiled metrics with one batch."""
    if model._compile_metrics is not None:
        model._compile_metrics.update_state(y_true, y_pred, sample_weight)


def metric_results(model: keras.Model, values: Sequence[Any]) -> dict[str, float]:
    """Returns the metrics' results by name in logs, given values of `metric_variables`.

    The names of a layer's metrics are prefixed with its name, those of the model's own are not. Of a vector of several
    elements, each has the metric's name and its index.

    Raises:
      InputError: a result has more dims than a vector.
    """
    results: dict[str, Any] = {}
    with keras.StatelessScope(state_mapping=list(zip(metric_variables(model), values, strict=True))):
        if model._compile_metrics is not None:
            for name, result in model._compile_metrics.result().items():
                results |= by_name(name, result)
        for prefix, metric in _updated_by_calls(model):
            results |= {f"{prefix}{name}": value for name, value in by_name(metric.name, metric.result()).items()}
        # In the scope, because a result may be a variable.
        return {name: value for key, result in results.items() for name, value in _numbers(key, np.asarray(result))}


def by_name(name: str, result: Any) -> dict[str, Any]:
    """Returns the parts of a metric's result by their names in logs: a dict has them, anything else has the metric's name."""
    return result if isinstance(result, dict) else {name: result}


def _numbers(name: str, result: np.ndarray) -> Iterator[tuple[str, float]]:
    """Returns the numbers of a metric's result by their names in logs."""
    if result.size == 1:
        yield name, float(result.item())
        return
    if result.ndim > 1:
        raise InputError(
            f"A metric's result must be a number, a vector, or a dict of them. Received: {name} with the shape "
            f"{list(result.shape)}. Return a dict with a name for each number."
        )
    yield from ((f"{name}_{i}", float(x)) for i, x in enumerate(result))
