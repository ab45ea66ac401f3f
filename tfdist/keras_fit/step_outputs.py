"""Finds the outputs of a custom `train_step` or `test_step`, and the metrics that some of them are results of."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import OneReplica
from tfdist.data.batches import count_rows
from tfdist.errors import InputError
from tfdist.keras_fit.one_device import Apply, Replica, replica_context
from tfdist.step.metrics import replaced_results

ReduceOp = Literal["mean", "sum"]  # over the values of replicas


class StepOutputs(NamedTuple):
    """Specification of the outputs of a step."""

    shapes: Mapping[str, tuple[int, ...]] = {}  # by name of the output
    # For each output that is the result of a metric, the name of the metric as in `KerasMetrics.by_metric`
    sources: Mapping[str, str] = {}
    computed_from_metrics: Sequence[str] = ()  # names of outputs that are computed from results of metrics


def inspect_step(model: keras.Model, step: Callable[[Any], Any], batch: Any, apply: Apply | None = None) -> StepOutputs:
    """Traces a custom step with symbolic tensors, without changing existing variables; new ones have their initial values.

    `batch` is a structure of `tf.TensorSpec`, and `apply` is called when the step applies gradients.
    """
    result = StepOutputs()

    def inspect(data: Any) -> Any:
        nonlocal result
        shapes: dict[str, tuple[int, ...]] = {}
        sources: dict[str, str] = {}
        computed_names: list[str] = []
        rows = count_rows(data)
        replica = Replica(OneReplica(), rows, rows, apply and _unconditional_apply(apply, model.name))
        with replica_context(replica), keras_internals.inline_functions(), _record_results(model) as results:
            outputs = step(data) or {}
        metric_results = {id(result) for _, result in results.values()}
        for key, value in flatten_logs(outputs).items():
            shapes[key] = tuple(tf.convert_to_tensor(value).shape)
            if id(value) in results:
                sources[key] = results[id(value)][0]
            elif keras_internals.is_computed_from(value, metric_results):
                computed_names.append(key)
        result = StepOutputs(shapes, sources, computed_names)
        return outputs

    keras_internals.trace_symbolically(inspect, batch)
    return result


def _unconditional_apply(apply: Apply, name: str) -> Apply:
    """Returns `apply`, but rejects calls inside a condition or a loop, where tf.distribute cannot communicate."""
    graph = tf.compat.v1.get_default_graph()

    def checked_apply(*arguments: Any) -> None:
        if tf.compat.v1.get_default_graph() is not graph:
            raise InputError(
                "Gradients are summed over replicas where they are applied, which must not be inside tf.cond or "
                f"tf.while_loop. Received: {name}, which applies gradients there. Apply gradients in every step, multiplied "
                "by 0 where they must have no effect, or use --strategy=single."
            )
        apply(*arguments)

    return checked_apply


def flatten_logs(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens the outputs of a step as in Keras's logs: the results of compiled metrics are a nested dictionary."""
    logs: dict[str, Any] = {}
    for key, value in outputs.items():
        logs |= flatten_logs(value) if isinstance(value, Mapping) else {key: value}
    return logs


@contextlib.contextmanager
def _record_results(model: keras.Model) -> Iterator[dict[int, tuple[str, Any]]]:
    """Context that records the results of the model's metrics: (name of the metric, result), by id of the result."""
    results: dict[int, tuple[str, Any]] = {}  # keeps the values alive, as ids must be unique

    def record_result(index: int, metric: keras.Metric, result: Callable[[], Any]) -> Any:
        metric_result = result()
        for name, value in keras_internals.by_name(metric.name, metric_result).items():
            results[id(value)] = f"{index}/{name}", value
        return metric_result

    metrics = enumerate(model.metrics)
    with replaced_results({m: functools.partial(record_result, index, m, m.result) for index, m in metrics}):
        yield results
