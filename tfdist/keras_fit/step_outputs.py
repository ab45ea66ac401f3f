"""Outputs of a custom `train_step` or `test_step`, other than metrics."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import OneReplica
from tfdist.data.batches import count_rows
from tfdist.distribution.strategy import State, Strategy
from tfdist.errors import InputError
from tfdist.keras_fit.one_device import Apply, Replica, replica_context
from tfdist.step.layer_state import assign
from tfdist.step.loss import to_floatx
from tfdist.step.metrics import replaced_results
from tfdist.step.state_store import StateStore

ReduceOp = Literal["mean", "sum"]  # over the values of replicas


class StepOutputs(NamedTuple):
    """Specification of the outputs of a step."""

    shapes: Mapping[str, tuple[int, ...]] = {}  # by name
    # Metrics, named as in `KerasMetrics.by_metric`, by the names of outputs that are their results
    sources: Mapping[str, str] = {}
    computed_from_metrics: Sequence[str] = ()  # names of outputs that are computed from results of metrics


class Logs:
    """The outputs of the last step, `name`: weighted means or sums over replicas, by the names of outputs; by default means.

    Attributes:
      sources: see `StepOutputs`.
    """

    def __init__(
        self,
        outputs: StepOutputs,
        strategy: Strategy,
        store: StateStore,
        name: str,
        reduce_ops: Mapping[str, ReduceOp],
    ):
        self._strategy, self._name, self.sources, self._reduce_ops = strategy, name, outputs.sources, reduce_ops
        dtype = tf.as_dtype(keras.config.floatx())
        states = [State(f"{name}/{key}", shape, dtype, True) for key, shape in outputs.shapes.items()]
        self._variables = dict(zip(outputs.shapes, store.variables(states), strict=True))

    def store(self, outputs: Mapping[str, Any], weights: Mapping[ReduceOp, tf.Tensor]) -> None:
        """Stores a replica's outputs, weighted by op; inside a replica function."""
        values_by_name = flatten_logs(outputs)
        values = [
            tf.math.multiply_no_nan(to_floatx(values_by_name[key]), weights[self._reduce_ops.get(key, "mean")])
            for key in self._variables
        ]
        if values:
            totals = self._strategy.collectives.all_reduce(values, name=self._name)
            assign(list(self._variables.values()), totals)

    def read(self) -> dict[str, np.ndarray]:
        """Returns the values in host memory."""
        return {key: np.asarray(self._strategy.local(variable)[0]) for key, variable in self._variables.items()}


def inspect_step(model: keras.Model, step: Callable[[Any], Any], batch: Any, apply: Apply | None = None) -> StepOutputs:
    """Traces a custom step with symbolic tensors, without changing variables; new variables have their initial values.

    `batch` is a structure of `tf.TensorSpec`, and `apply` is called when the step applies gradients.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    sources: dict[str, str] = {}
    computed_names: list[str] = []

    def inspect(data: Any) -> Any:
        shapes.clear()
        sources.clear()
        computed_names.clear()
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
        return outputs

    keras_internals.trace_symbolically(inspect, batch)
    return StepOutputs(shapes, sources, computed_names)


def _unconditional_apply(apply: Apply, name: str) -> Apply:
    """Rejects gradients that are applied inside a condition or a loop, where tf.distribute cannot communicate."""
    graph = tf.compat.v1.get_default_graph()

    def checked_apply(*arguments: Any) -> None:
        if tf.compat.v1.get_default_graph() is not graph:
            raise InputError(
                "Gradients are summed over replicas where they are applied, which must not be inside tf.cond or "
                f"tf.while_loop. Received: {name}, which applies some there. Apply them in every step, multiplied by 0 "
                "where they must have no effect, or use --strategy=single."
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
    """Context that records the results of the model's metrics, (metric, result) by id."""
    results: dict[int, tuple[str, Any]] = {}  # keeps the values alive, as ids must be unique

    def record_result(number: int, metric: keras.Metric, result: Callable[[], Any]) -> Any:
        metric_result = result()
        for name, value in keras_internals.by_name(metric.name, metric_result).items():
            results[id(value)] = f"{number}/{name}", value
        return metric_result

    metrics = enumerate(model.metrics)
    with replaced_results({m: functools.partial(record_result, number, m, m.result) for number, m in metrics}):
        yield results
