"""What a model's own `train_step` or `test_step` returns, beside the metrics that it updates."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import OneReplica
from tfdist.data.batches import count_rows
from tfdist.kept import Kept
from tfdist.loss import floating
from tfdist.stock.one_device import Apply, Replica, running
from tfdist.strategy import HasCollectives, State


class Returned(NamedTuple):
    """What a step returns.

    Attributes:
      shapes: by the values' names.
      sources: which metric's result a value is, if it is one, as `KerasMetrics.by_metric` names it.
    """

    shapes: Mapping[str, tuple[int, ...]] = {}
    sources: Mapping[str, str] = {}


class Logs:
    """The last step's values, averaged over replicas, each weighted by its rows.

    Attributes:
      sources: of the values.
    """

    def __init__(self, returned: Returned, strategy: HasCollectives, kept: Kept, name: str):
        """Args: returned: what the step returns; kept: where the values are; name: of the step."""
        self._strategy, self._name, self.sources = strategy, name, returned.sources
        states = [State(f"{name}/{key}", shape, _floatx(), True) for key, shape in returned.shapes.items()]
        self._kept = dict(zip(returned.shapes, kept.variables(states), strict=True))

    def keep(self, found: Mapping[str, Any], rows: tf.Tensor, batch_size: tf.Tensor) -> None:
        """Takes what one replica's step returned; inside a replica function."""
        part = floating(rows) / floating(batch_size)
        values = [tf.math.multiply_no_nan(floating(found[key]), part) for key in self._kept]
        if values:
            totals = self._strategy.collectives.all_reduce(values, name=self._name)
            for variable, total in zip(self._kept.values(), totals, strict=True):
                variable.assign(total)

    def read(self) -> dict[str, np.ndarray]:
        """The values, on the host."""
        return {key: np.asarray(self._strategy.local(variable)[0]) for key, variable in self._kept.items()}


def look_at(model: keras.Model, step: Callable[[Any], Any], batch: Any, apply: Apply | None = None) -> Returned:
    """Calls a model's own step with symbolic tensors; no variable changes.

    Args:
      model: whose step it is.
      step: of a batch.
      batch: structure of `tf.TensorSpec`.
      apply: called where the step applies gradients.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    sources: dict[str, str] = {}

    def looked_at(data: Any) -> Any:
        rows = count_rows(data)
        with running(Replica(OneReplica(), rows, rows, apply)), _results_noted(model) as results:
            found = step(data) or {}
        for key, value in found.items():
            shapes[key] = tuple(tf.convert_to_tensor(value).shape)
            if id(value) in results:
                sources[key] = results[id(value)][0]
        return found

    keras_internals.traced_without_effects(looked_at, batch)
    return Returned(shapes, sources)


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
