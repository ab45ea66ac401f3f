"""Metrics of global batches: each replica's sums are merged once per call of the loop, and added on the host in float64.

Keras metrics store sums (a total and a count, or the counts of a confusion matrix), so the global values are sums over
replicas and calls. Merged values are copied to the host once per call, and the variables on the device are reset to zero.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.gradients import Bucketed, Sum
from tfdist.step.loss import to_floatx
from tfdist.step.partitioned_step import Division

# The weight of scalars in Keras's means, such as the result of a metric function that returns the mean of its batch.
# `keras.metrics.Mean` gives a scalar the weight 1. This is correct for a whole batch, but on a replica the scalar is a mean
# over the replica's rows, and must be weighted by their number.
_weight: contextvars.ContextVar[tf.Tensor | None] = contextvars.ContextVar("weight of scalars", default=None)


def weight_scalars(weight: tf.Tensor | None) -> contextlib.AbstractContextManager[None]:
    """Context in which `keras.metrics.Mean` and its subclasses apply a weight to scalars without a sample weight.

    Values with rows are averaged over rows as usual. A scalar in `keras.metrics.Sum` is added unchanged, because it may
    be a sum or a mean over rows. A mean that is updated inside a `tf.function` of the model's code is not weighted,
    because such a function is not retraced for each caller. `weight` is a floating-point scalar, the replica's fraction
    of the rows of a batch; None for the behavior of Keras.
    """
    _patch()
    return keras_internals.context_value(_weight, weight)


@functools.cache
def _patch() -> None:
    original = keras.metrics.Mean.update_state

    @functools.wraps(original)
    def update_state(self: keras.metrics.Mean, values: Any, sample_weight: Any = None) -> None:
        weight = _weight.get()
        if weight is not None and sample_weight is None and keras.ops.convert_to_tensor(values).shape.rank == 0:
            if keras_internals.is_in_current_function(weight):
                sample_weight = tf.cast(weight, self.dtype)
        original(self, values, sample_weight)

    keras.metrics.Mean.update_state = update_state


class LossShare(NamedTuple):
    """One replica's share of the loss of some rows of a global batch."""

    value: tf.Tensor  # scalar; the sum of all shares is the global batch's recorded loss
    terms: list[tf.Tensor]  # scalars; shares of each loss with which the model was compiled, before weighting
    rows: tf.Tensor  # scalar integer; number of rows of this share
    batch_size: int | tf.Tensor  # number of rows of the global batch


class ModelMetrics:
    """The metrics that a trainer records: compiled metrics, and metrics of the model and its layers.

    `variables` are the variables of the metrics and of `losses`.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self.division: Division = "own"  # the rows that each replica computes
        self.kept: frozenset[int] = frozenset()  # indices of the variables that are not sums over batches
        # Keras's means of the outputs' losses; empty if there is a single loss
        self.losses = keras_internals.loss_means(model)[1:]
        loss_variables = [variable for mean in self.losses for variable in mean.variables]
        self.variables = [*keras_internals.metric_variables(model), *loss_variables]

    @property
    def replicas_see_all_rows(self) -> bool:
        """Whether each replica's variables are computed from all rows, not only from its own."""
        return self.division != "own"

    def keep(self, names: Collection[str]) -> None:
        """Declares the metrics that are not sums over batches, such as a maximum, by name."""
        metrics = keras_internals.named_metrics(self._model)
        names_of_variables = [name for name, metric in metrics for _ in metric.variables]
        self.kept = frozenset(i for i, name in enumerate(names_of_variables) if name in names)

    def restore_kept(self, values: Sequence[np.ndarray], strategy: Strategy) -> None:
        """Assigns values to the kept variables on every replica, so that the next batches update these values."""
        indices = self.kept if values else ()
        assign_values([self.variables[i] for i in indices], [values[i] for i in indices], strategy)

    def update(self, y: Any, outputs: Any, weight: Any, share: LossShare) -> None:
        """Updates the metrics with one replica's rows. A replica function."""
        with weight_scalars(to_floatx(share.rows) / to_floatx(share.batch_size)):
            keras_internals.update_metrics(self._model, y, outputs, weight)
        track_outputs(self.losses, share.terms, share.rows, share.batch_size)

    def results(self, values: Sequence[np.ndarray]) -> dict[str, float]:
        """Returns the losses of the outputs and the metrics, by name in records, for values of `variables`."""
        count = len(keras_internals.metric_variables(self._model))
        means = zip(self.losses, values[count::2], values[count + 1 :: 2], strict=True)
        output_losses = {mean.name: float(total / max(rows, 1e-300)) for mean, total, rows in means}
        return output_losses | keras_internals.metric_results(self._model, values[:count])


class KerasMetrics(ModelMetrics):
    """All metrics in `keras.Model.metrics`, as logged by Keras's own `fit`; includes the means of the losses."""

    def __init__(self, model: keras.Model):
        super().__init__(model)
        self.variables = [variable for metric in model.metrics for variable in metric.variables]

    def update(self, y: Any, outputs: Any, weight: Any, share: LossShare) -> None:
        super().update(y, outputs, weight, share)
        mean = keras_internals.loss_means(self._model)[0]  # over batches, each weighted by its number of rows
        mean.total.assign_add(tf.cast(share.value, mean.total.dtype) * tf.cast(share.batch_size, mean.total.dtype))
        mean.count.assign_add(tf.cast(share.rows, mean.count.dtype))

    @functools.cached_property
    def _means(self) -> list[keras.metrics.Mean]:
        """The metrics whose result is the quotient of their variables."""
        variable_ids = {id(variable) for variable in self.variables}
        parts = [*self._model.metrics, *keras_internals.metrics_of(self._model)]
        means = [part for part in parts if getattr(part.result, "__func__", None) is keras.metrics.Mean.result]
        return [mean for mean in means if id(mean.total) in variable_ids]

    def results(self, values: Sequence[np.ndarray]) -> dict[str, float]:
        """Returns Keras's logs."""
        return {key.partition("/")[2]: value for key, value in self.by_metric(values).items()}

    def by_metric(self, values: Sequence[np.ndarray]) -> dict[str, Any]:
        """Returns the results of each metric; a key is the metric's index in the model, "/", and the name in logs."""
        sums = dict(zip(map(id, self.variables), values, strict=True))
        # Means are computed without TensorFlow operations.
        means = {mean: _quotient(mean, sums[id(mean.total)], sums[id(mean.count)]) for mean in self._means}
        mean_variables = {id(variable) for mean in means for variable in mean.variables}
        other_values = [(v, sums[id(v)]) for v in self.variables if id(v) not in mean_variables]
        scope = keras.StatelessScope(other_values) if other_values else contextlib.nullcontext()
        with replaced_results({mean: functools.partial(np.asarray, value) for mean, value in means.items()}), scope:
            return {
                f"{number}/{name}": tf.nest.map_structure(_to_python, value)
                for number, metric in enumerate(self._model.metrics)
                for name, value in keras_internals.by_name(metric.name, metric.result()).items()
            }


@contextlib.contextmanager
def replaced_results(functions: Mapping[keras.Metric, Callable[[], Any]]) -> Iterator[None]:
    """Context in which functions replace the `result` methods of metrics."""
    for metric, function in functions.items():
        metric.__dict__["result"] = function
    try:
        yield
    finally:
        for metric in functions:
            metric.__dict__.pop("result", None)


def _quotient(mean: keras.metrics.Mean, total: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Returns the result of a mean, computed in its dtype as in Keras."""
    dtype = tf.as_dtype(mean.dtype).as_numpy_dtype
    return np.asarray(total, dtype) / np.asarray(count or 1, dtype)


def _to_python(value: Any) -> Any:
    array = np.asarray(value)
    return array if array.ndim else array.item()


def track_outputs(
    means: Sequence[keras.metrics.Mean], values: Sequence[tf.Tensor], rows: tf.Tensor, batch_size: int | tf.Tensor
) -> None:
    """Adds shares of the outputs' losses to Keras's means over batches, with equal weight for each batch.

    Keras weights a batch by its static size, which is unknown if batch sizes vary. A model with a single loss has no
    separate mean for that loss.
    """
    for mean, value in zip(means, values, strict=False):
        mean.total.assign_add(tf.cast(value, mean.total.dtype))
        mean.count.assign_add(tf.cast(rows, mean.count.dtype) / tf.cast(batch_size, mean.count.dtype))


def add_sums(sums: Sequence[np.ndarray], values: Sequence[np.ndarray], kept: Collection[int] = ()) -> list[np.ndarray]:
    """Adds the merged values of a call to sums, which may be empty; values with `kept` indices already include the sums."""
    pairs = enumerate(zip(sums or values, values, strict=True))
    return [b if i in kept or not sums else a + b for i, (a, b) in pairs]


def assign_values(variables: Sequence[keras.Variable], values: Sequence[np.ndarray], strategy: Strategy) -> None:
    """Assigns values to variables on every replica."""
    for variable, value in zip(variables, values, strict=True):
        strategy.blocks.assign_value(keras_internals.value_of(variable), per_replica=True, value=np.asarray(value))


def check_names(model: keras.Model) -> None:
    """Raises `InputError` if a metric updated by calls of the model has the name of another such or compiled metric."""
    names = [name for name, _ in keras_internals.metrics_updated_by_calls(model)]
    compiled_names = [metric.name for metric in keras_internals.compiled_metrics(model)]
    for name in names:
        if names.count(name) > 1 or name in compiled_names:
            raise InputError(
                f"Metrics of a model and its layers must have unique names. Received twice: {name}. Rename the layers, or "
                "the metrics."
            )


def check_sums(metrics: Sequence[keras.Metric]) -> None:
    """Raises `InputError` for a metric whose variables cannot be summed over replicas from one reset to the next."""
    for metric in metrics:
        for attribute, value in vars(metric).items():
            if isinstance(value, tf.Variable):
                raise InputError(
                    f"A metric's variables must be Keras variables, which are summed over replicas. Received: {metric.name} "
                    f"with a tf.Variable, {attribute}. Create the variable with add_variable."
                )
        with keras.StatelessScope() as scope:
            metric.reset_state()
        for variable in metric.variables:
            received = f"Received: {metric.name} with {variable.path}"
            if variable.aggregation != "sum":
                raise InputError(
                    "A metric's variables must be sums over replicas (aggregation='sum'). "
                    f"{received}, which has aggregation={variable.aggregation!r}."
                )
            value = scope.get_current_value(variable)
            if value is None or np.any(np.asarray(value)):
                raise InputError(
                    "A metric's reset_state must set all of its variables to 0, because they are summed over replicas from "
                    f"one reset to the next. {received}, which {'is not reset' if value is None else 'gets another value'}. "
                    "Reset the variable to 0, and store values that must persist in a callback."
                )


def compile_read_and_reset(metrics: ModelMetrics, strategy: Strategy) -> Callable[[], list[np.ndarray]]:
    """Returns a function that merges the metrics' variables over replicas, resets them and returns the sums."""
    if not metrics.variables:
        return list
    compiled_function = tf.function(lambda: read_and_reset(metrics, strategy), autograph=False)
    return lambda: [np.asarray(value, np.float64) for value in compiled_function()]


def read_and_reset(metrics: ModelMetrics, strategy: Strategy) -> list[tf.Tensor]:
    """Merges the metrics' variables over replicas, resets them and returns the sums; in a compiled function."""
    variables = metrics.variables

    def replica_function() -> list[tf.Tensor]:
        totals = [tf.identity(variable.value) for variable in variables]
        if not metrics.replicas_see_all_rows:
            totals = Bucketed(Sum()).reduce(totals, [], strategy.job_collectives, name="metrics").totals
        with tf.control_dependencies(totals):
            for variable in variables:
                variable.assign(tf.zeros(variable.shape, variable.dtype))
        return totals

    return [strategy.local(value)[0] for value in strategy.run(replica_function)] if variables else []
