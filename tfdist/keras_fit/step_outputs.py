"""Outputs of a custom `train_step` or `test_step`, besides the metrics that it updates."""

import contextlib
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
from tfdist.keras_fit.one_device import Apply, Replica, running
from tfdist.step.layer_state import assign
from tfdist.step.loss import floating
from tfdist.step.state_store import StateStore

ReduceOp = Literal["mean", "sum"]  # how replicas' values are combined


class Returned(NamedTuple):
    """Description of what a step returns.

    Attributes:
      shapes: shapes by name of value.
      sources: for values that are results of metrics, the metric, named as by `KerasMetrics.by_metric`.
      computed_from_metrics: names of values that are computed from results of metrics.
    """

    shapes: Mapping[str, tuple[int, ...]] = {}
    sources: Mapping[str, str] = {}
    computed_from_metrics: Sequence[str] = ()


class Logs:
    """The values returned by the last step: weighted means or sums over replicas.

    Attributes:
      sources: see `Returned`.
    """

    def __init__(
        self,
        returned: Returned,
        strategy: Strategy,
        store: StateStore,
        name: str,
        reduce_ops: Mapping[str, ReduceOp] | None = None,
    ):
        """Creates variables for the values.

        Args:
          returned: description of what the step returns.
          strategy: strategy on which it runs.
          store: store of the values.
          name: name of the step.
          reduce_ops: how values are combined, by name; by default means.
        """
        self._strategy, self._name, self.sources, self._reduce_ops = strategy, name, returned.sources, reduce_ops or {}
        states = [
            State(f"{name}/{key}", shape, tf.as_dtype(keras.config.floatx()), True)
            for key, shape in returned.shapes.items()
        ]
        self._variables = dict(zip(returned.shapes, store.variables(states), strict=True))

    def store(self, outputs: Mapping[str, Any], weights: Mapping[ReduceOp, tf.Tensor]) -> None:
        """Stores what a replica's step returned, weighted by how each value is combined; inside a replica function."""
        returned = flattened(outputs)
        values = [
            tf.math.multiply_no_nan(floating(returned[key]), weights[self._reduce_ops.get(key, "mean")])
            for key in self._variables
        ]
        if values:
            totals = self._strategy.collectives.all_reduce(values, name=self._name)
            assign(list(self._variables.values()), totals)

    def read(self) -> dict[str, np.ndarray]:
        """Returns the values, on the host."""
        return {key: np.asarray(self._strategy.local(variable)[0]) for key, variable in self._variables.items()}


def inspect_step(
    model: keras.Model,
    step: Callable[[Any], Any],
    batch: Any,
    apply: Apply | None = None,
) -> Returned:
    """Traces a custom step with symbolic tensors; no variable changes, and new ones keep their initial values.

    Args:
      model: model to which the step belongs.
      step: function of a batch.
      batch: structure of `tf.TensorSpec`.
      apply: called where the step applies gradients.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    sources: dict[str, str] = {}
    computed: list[str] = []

    def inspected(data: Any) -> Any:
        shapes.clear()
        sources.clear()
        computed.clear()
        rows = count_rows(data)
        replica = Replica(OneReplica(), rows, rows, apply and _outside_conditions(apply, model.name))
        with running(replica), keras_internals.functions_inlined(), _recorded_results(model) as results:
            returned = step(data) or {}
        metric_results = {id(result) for _, result in results.values()}
        for key, value in flattened(returned).items():
            shapes[key] = tuple(tf.convert_to_tensor(value).shape)
            if id(value) in results:
                sources[key] = results[id(value)][0]
            elif keras_internals.is_computed_from(value, metric_results):
                computed.append(key)
        return returned

    keras_internals.trace_symbolically(inspected, batch)
    return Returned(shapes, sources, computed)


def _outside_conditions(apply: Apply, name: str) -> Apply:
    """Rejects steps that apply gradients inside a condition or a loop, where tf.distribute cannot communicate."""
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


def flattened(returned: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens what a step returned as in Keras's logs: the results of compiled metrics are a nested dictionary."""
    logs: dict[str, Any] = {}
    for key, value in returned.items():
        logs |= flattened(value) if isinstance(value, Mapping) else {key: value}
    return logs


@contextlib.contextmanager
def _recorded_results(model: keras.Model) -> Iterator[dict[int, tuple[str, Any]]]:
    """Context in which results of the model's metrics are recorded, by id: (metric, result), which keeps it alive."""
    recorded: dict[int, tuple[str, Any]] = {}

    def recording(number: int, metric: keras.Metric) -> Callable[..., Any]:
        result = metric.result

        def recorded_result() -> Any:
            metric_result = result()
            for name, value in keras_internals.by_name(metric.name, metric_result).items():
                recorded[id(value)] = f"{number}/{name}", value
            return metric_result

        return recorded_result

    metrics = list(model.metrics)
    for number, metric in enumerate(metrics):
        metric.__dict__["result"] = recording(number, metric)
    try:
        yield recorded
    finally:
        for metric in metrics:
            metric.__dict__.pop("result", None)
