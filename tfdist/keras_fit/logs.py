"""What a model's own `train_step` or `test_step` returns, beside the metrics that it updates."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import OneReplica
from tfdist.data.batches import count_rows
from tfdist.distribution.strategy import HasCollectives, State
from tfdist.errors import InputError
from tfdist.keras_fit.one_device import Apply, Replica, running
from tfdist.step.loss import floating
from tfdist.step.state_store import StateStore

ReduceOp = Literal["mean", "sum"]  # how the values of replicas make the whole batch's


class Returned(NamedTuple):
    """What a step returns.

    Attributes:
      shapes: by the values' names.
      sources: which metric's result a value is, if it is one, as `KerasMetrics.by_metric` names it.
      computed_from_metrics: names of values that are computed from metrics' results.
    """

    shapes: Mapping[str, tuple[int, ...]] = {}
    sources: Mapping[str, str] = {}
    computed_from_metrics: Sequence[str] = ()


class Logs:
    """The last step's values: means or sums over replicas, each weighted.

    Attributes:
      sources: of the values.
    """

    def __init__(
        self,
        returned: Returned,
        strategy: HasCollectives,
        kept: StateStore,
        name: str,
        reduce_ops: Mapping[str, ReduceOp] | None = None,
    ):
        """Args: returned: what the step returns; kept: where the values are; name: of the step; reduce_ops: of the values."""
        self._strategy, self._name, self.sources, self._reduce_ops = strategy, name, returned.sources, reduce_ops or {}
        states = [State(f"{name}/{key}", shape, _floatx(), True) for key, shape in returned.shapes.items()]
        self._kept = dict(zip(returned.shapes, kept.variables(states), strict=True))

    def keep(self, found: Mapping[str, Any], weights: Mapping[ReduceOp, tf.Tensor]) -> None:
        """Takes what one replica's step returned, weighted by what each value is; inside a replica function."""
        returned = flat(found)
        values = [
            tf.math.multiply_no_nan(floating(returned[key]), weights[self._reduce_ops.get(key, "mean")])
            for key in self._kept
        ]
        if values:
            totals = self._strategy.collectives.all_reduce(values, name=self._name)
            for variable, total in zip(self._kept.values(), totals, strict=True):
                variable.assign(total)

    def read(self) -> dict[str, np.ndarray]:
        """The values, on the host."""
        return {key: np.asarray(self._strategy.local(variable)[0]) for key, variable in self._kept.items()}


def inspect_step(
    model: keras.Model,
    step: Callable[[Any], Any],
    batch: Any,
    apply: Apply | None = None,
    begin: Callable[[], None] = lambda: None,
) -> Returned:
    """Calls a model's own step with symbolic tensors; no variable changes, those that it creates begin with their values.

    Args:
      model: whose step it is.
      step: of a batch.
      batch: structure of `tf.TensorSpec`.
      apply: called where the step applies gradients.
      begin: called before the step, which is called a second time if it fails: by variables that the first call has created.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    sources: dict[str, str] = {}
    computed: list[str] = []

    def looked_at(data: Any) -> Any:
        begin()
        shapes.clear()
        sources.clear()
        computed.clear()
        rows = count_rows(data)
        replica = Replica(OneReplica(), rows, rows, apply and _in_no_condition(apply, model.name))
        with running(replica), keras_internals.functions_inlined(), _results_noted(model) as results:
            found = step(data) or {}
        of_metrics = {id(result) for _, result in results.values()}
        for key, value in flat(found).items():
            shapes[key] = tuple(tf.convert_to_tensor(value).shape)
            if id(value) in results:
                sources[key] = results[id(value)][0]
            elif keras_internals.is_computed_from(value, of_metrics):
                computed.append(key)
        return found

    keras_internals.traced_without_effects(looked_at, batch)
    return Returned(shapes, sources, computed)


def _in_no_condition(apply: Apply, name: str) -> Apply:
    """Refuses steps that apply gradients in a condition or a loop, where tf.distribute cannot send them."""
    graph = tf.compat.v1.get_default_graph()

    def applied(*given: Any) -> None:
        if tf.compat.v1.get_default_graph() is not graph:
            raise InputError(
                "Gradients are summed over replicas where they are applied, which must not be inside of tf.cond or "
                f"tf.while_loop. Received: {name}, which applies some there. Apply them in every step, multiplied by 0 where "
                "they do not count, or use --strategy=single."
            )
        apply(*given)

    return applied


def flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """What a step returned, as Keras logs it: the results of compiled metrics are a dictionary in it."""
    named: dict[str, Any] = {}
    for key, value in found.items():
        named |= flat(value) if isinstance(value, Mapping) else {key: value}
    return named


@contextlib.contextmanager
def _results_noted(model: keras.Model) -> Iterator[dict[int, tuple[str, Any]]]:
    """Inside, each result of the model's metrics is noted: by its id, which metric's it is, and the result, which lives on."""
    noted: dict[int, tuple[str, Any]] = {}

    def noting(number: int, metric: keras.Metric) -> Callable[..., Any]:
        result = metric.result

        def noted_result() -> Any:
            found = result()
            for name, value in (found if isinstance(found, dict) else {metric.name: found}).items():
                noted[id(value)] = f"{number}/{name}", value
            return found

        return noted_result

    metrics = list(model.metrics)
    for number, metric in enumerate(metrics):
        metric.__dict__["result"] = noting(number, metric)
    try:
        yield noted
    finally:
        for metric in metrics:
            metric.__dict__.pop("result", None)


def _floatx() -> tf.DType:
    return tf.as_dtype(keras.config.floatx())
