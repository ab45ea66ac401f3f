"""Metrics of a global batch: each replica's sums are merged once a call, and added up on the host in float64.

Keras metrics keep sums (a total and a count, counts of a confusion matrix), so those of the whole are the sums over
replicas and over calls. Merged values leave the device once a call, and the device starts again from zero.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import HasCollectives
from tfdist.errors import InputError
from tfdist.gradients import Bucketed, Sum


class Share(NamedTuple):
    """One replica's part in the loss of some rows of a global batch.

    Attributes:
      value: scalar; the sum over all shares is the global batch's loss.
      terms: scalars likewise, one for each loss that the model was compiled with, before its weight.
      rows: scalar integer; rows of this share.
      batch_size: rows of the global batch.
    """

    value: tf.Tensor
    terms: list[tf.Tensor]
    rows: tf.Tensor
    batch_size: int | tf.Tensor


class ModelMetrics:
    """The metrics of a compiled and built model, as a trainer records them: the compiled ones and those of layers."""

    def __init__(self, model: keras.Model):
        """Args: model: compiled and built."""
        self._model = model
        self.variables = keras_internals.metric_variables(model)

    def update(self, y: Any, outputs: Any, weight: Any, share: Share) -> None:
        """Takes one replica's rows into the metrics; inside a replica function."""
        keras_internals.update_metrics(self._model, y, outputs, weight)

    def results(self, values: Sequence[np.ndarray]) -> dict[str, float]:
        """The metrics by their names in records, for values of their variables."""
        return keras_internals.metric_results(self._model, values)


class KerasMetrics(ModelMetrics):
    """All that `keras.Model.metrics` lists, as Keras's own `fit` logs it: the means of the losses, too."""

    def __init__(self, model: keras.Model):
        """Args: model: compiled and built."""
        self._model = model
        self.variables = [variable for metric in model.metrics for variable in metric.variables]

    def update(self, y: Any, outputs: Any, weight: Any, share: Share) -> None:
        """See base class."""
        super().update(y, outputs, weight, share)
        whole, *outputs = keras_internals.loss_means(self._model)
        track_loss(whole, share.value, share.rows, share.batch_size)
        track_outputs(outputs, share.terms, share.rows, share.batch_size)

    def results(self, values: Sequence[np.ndarray]) -> dict[str, float]:
        """The logs of Keras, by its names."""
        logs: dict[str, Any] = {}
        for key, value in self.by_metric(values).items():
            logs[key.partition("/")[2]] = value
        return logs

    def by_metric(self, values: Sequence[np.ndarray]) -> dict[str, Any]:
        """Each metric's result, under its number among the model's, a slash and its name in logs."""
        found: dict[str, Any] = {}
        with keras.StatelessScope(state_mapping=list(zip(self.variables, values, strict=True))):
            for number, metric in enumerate(self._model.metrics):
                result = metric.result()
                named = result if isinstance(result, dict) else {metric.name: result}
                found |= {f"{number}/{name}": _plain(value) for name, value in named.items()}
        return found


def _plain(value: Any) -> Any:
    """A number, or an array of them."""
    array = np.asarray(value)
    return array if array.ndim else array.item()


def track_loss(mean: keras.metrics.Mean, value: tf.Tensor, rows: tf.Tensor, batch_size: int | tf.Tensor) -> None:
    """Takes a share of a loss into Keras's mean over batches, in which each batch weighs as many rows as it has."""
    mean.total.assign_add(tf.cast(value, mean.total.dtype) * tf.cast(batch_size, mean.total.dtype))
    mean.count.assign_add(tf.cast(rows, mean.count.dtype))


def track_outputs(
    means: Sequence[keras.metrics.Mean], values: Sequence[tf.Tensor], rows: tf.Tensor, batch_size: int | tf.Tensor
) -> None:
    """Takes shares of the outputs' losses into Keras's means over batches, in which batches weigh alike.

    Keras weighs them by their static size, which batches of different sizes do not have. A model with one loss has no mean
    of its own for it.
    """
    for mean, value in zip(means, values, strict=False):
        mean.total.assign_add(tf.cast(value, mean.total.dtype))
        mean.count.assign_add(tf.cast(rows, mean.count.dtype) / tf.cast(batch_size, mean.count.dtype))


class Totals:
    """Sums of metric variables over some calls."""

    def __init__(self) -> None:
        """Starts empty."""
        self._sums: list[np.ndarray] = []

    @property
    def sums(self) -> list[np.ndarray]:
        """The sums so far, in the order of the variables."""
        return self._sums

    def add(self, values: Sequence[np.ndarray]) -> None:
        """Adds what one call merged."""
        self._sums = [a + b for a, b in zip(self._sums, values, strict=True)] if self._sums else list(values)

    def results(self, metrics: ModelMetrics) -> dict[str, float]:
        """The metrics of all that was added; empty before anything was."""
        return metrics.results(self._sums) if self._sums else {}


def check_names(model: keras.Model) -> None:
    """Raises `InputError` for layers' metrics of one name."""
    names = keras_internals.names_of_layers_metrics(model)
    for name in names:
        if names.count(name) > 1:
            raise InputError(
                f"Metrics of layers must have names of their own. Received twice: {name}. Rename the layers."
            )


def check_sums(metrics: Sequence[keras.Metric]) -> None:
    """Raises `InputError` for a metric whose variables are not sums over replicas."""
    for metric in metrics:
        for variable in metric.variables:
            if variable.aggregation != "sum":
                raise InputError(
                    "A metric's variables must add up over replicas (aggregation='sum'). Received: "
                    f"{metric.name} with {variable.path} of aggregation={variable.aggregation!r}."
                )


def make_drain(metrics: ModelMetrics, strategy: HasCollectives) -> Callable[[], list[np.ndarray]]:
    """Returns a function that merges the metrics' variables over replicas, zeroes them and returns the sums."""
    variables = metrics.variables
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
