"""Metrics of a global batch: each replica's sums are merged once a call, and added up on the host in float64.

Keras metrics keep sums (a total and a count, counts of a confusion matrix), so those of the whole are the sums over
replicas and over calls. Merged values leave the device once a call, and the device starts again from zero.
"""

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.errors import InputError
from tfdist.gradients import Bucketed, Sum
from tfdist.strategy import HasCollectives


class Totals:
    """Sums of metric variables over some calls."""

    def __init__(self) -> None:
        """Starts empty."""
        self._sums: list[np.ndarray] = []

    def add(self, values: Sequence[np.ndarray]) -> None:
        """Adds what one call merged."""
        self._sums = [a + b for a, b in zip(self._sums, values, strict=True)] if self._sums else list(values)

    def results(self, model: keras.Model) -> dict[str, float]:
        """The metrics of all that was added; empty before anything was."""
        return keras_internals.metric_results(model, self._sums) if self._sums else {}


def check(model: keras.Model) -> None:
    """Raises `InputError` for a metric whose variables are not sums over replicas, and for layers' metrics of one name."""
    names = keras_internals.names_of_layers_metrics(model)
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"Metrics of layers must have names of their own. Received twice: {name}. Rename the layers."
            )
    for metric in keras_internals.metrics_of(model):
        for variable in metric.variables:
            if variable.aggregation != "sum":
                raise InputError(
                    "A metric's variables must add up over replicas (aggregation='sum'). Received: "
                    f"{metric.name} with {variable.path} of aggregation={variable.aggregation!r}."
                )


def make_drain(model: keras.Model, strategy: HasCollectives) -> Callable[[], list[np.ndarray]]:
    """Returns a function that merges the metrics' variables over replicas, zeroes them and returns the sums."""
    variables = keras_internals.metric_variables(model)
    if not variables:
        return list

    def replica_function() -> list[tf.Tensor]:
        mine = [tf.identity(variable.value) for variable in variables]
        merged = Bucketed(Sum()).reduce(mine, [], strategy.collectives, name="metrics").totals
        with tf.control_dependencies(merged):
            for variable in variables:
                variable.assign(tf.zeros(variable.shape, variable.dtype))
        return merged

    @tf.function(autograph=False)
    def drain() -> list[tf.Tensor]:
        return [strategy.local(value)[0] for value in strategy.run(replica_function)]

    return lambda: [np.asarray(value, np.float64) for value in drain()]


def make_average_statistics(model: keras.Model, strategy: HasCollectives) -> Callable[[], None]:
    """Returns a function that replaces moving statistics by their mean over replicas, before they are used or saved."""
    variables = [v for v in model.non_trainable_variables if tf.as_dtype(v.dtype).is_floating]
    if not variables or strategy.replicas == 1:
        return lambda: None

    def replica_function() -> None:
        mine = [tf.identity(variable.value) for variable in variables]
        sums = Bucketed(Sum()).reduce(mine, [], strategy.collectives, name="statistics").totals
        for variable, total in zip(variables, sums, strict=True):
            variable.assign(total / strategy.collectives.size)

    @tf.function(autograph=False)
    def average() -> None:
        strategy.run(replica_function)

    return average
