"""What a model's own `train_step` or `test_step` returns, beside the metrics that it updates."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import OneReplica
from tfdist.data.batches import count_rows
from tfdist.kept import Kept
from tfdist.stock.one_device import Apply, Replica, running
from tfdist.strategy import HasCollectives, State

Shapes = Mapping[str, tuple[int, ...]]


class Logs:
    """The last step's values, averaged over replicas, each weighted by its rows."""

    def __init__(self, shapes: Shapes, strategy: HasCollectives, kept: Kept, name: str):
        """Args: shapes: by the values' names; kept: where they are; name: of the step."""
        self._strategy, self._name = strategy, name
        states = [State(f"{name}/{key}", shape, _floatx(), True) for key, shape in shapes.items()]
        self._kept = dict(zip(shapes, kept.variables(states), strict=True))

    def keep(self, found: Mapping[str, Any], rows: tf.Tensor, batch_size: tf.Tensor) -> None:
        """Takes what one replica's step returned; inside a replica function."""
        part = tf.cast(rows, _floatx()) / tf.cast(batch_size, _floatx())
        values = [tf.math.multiply_no_nan(tf.cast(found[key], _floatx()), part) for key in self._kept]
        if values:
            totals = self._strategy.collectives.all_reduce(values, name=self._name)
            for variable, total in zip(self._kept.values(), totals, strict=True):
                variable.assign(total)

    def read(self) -> dict[str, np.ndarray]:
        """The values, on the host."""
        return {key: np.asarray(self._strategy.local(variable)[0]) for key, variable in self._kept.items()}


def look_at(step: Callable[[Any], Any], batch: Any, apply: Apply | None = None) -> Shapes:
    """Calls a model's own step with symbolic tensors; no variable changes.

    Args:
      step: of a batch.
      batch: structure of `tf.TensorSpec`.
      apply: called where the step applies gradients.

    Returns:
      The names and shapes of what the step returns.
    """
    shapes: dict[str, tuple[int, ...]] = {}

    def looked_at(data: Any) -> Any:
        rows = count_rows(data)
        with running(Replica(OneReplica(), rows, rows, apply)):
            found = step(data) or {}
        shapes.update({key: tuple(tf.convert_to_tensor(value).shape) for key, value in found.items()})
        return found

    keras_internals.traced_without_effects(looked_at, batch)
    return shapes


def _floatx() -> tf.DType:
    return tf.as_dtype(keras.config.floatx())
