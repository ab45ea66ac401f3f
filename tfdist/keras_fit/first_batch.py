"""Compares the results of custom code on replicas with those on one device, on the first batch and before any step.

A replica computes with its own rows only. Whether custom code takes their mean for the loss, or their sum, or something
that needs all rows at once (pairs in a batch, a mean over weights), cannot be read from the code. So some rows of the
first batch are computed twice, without randomness and side effects: distributed over the replicas, and as one batch on
each. What is equal as a mean, or as a sum, is reduced that way from then on. Anything else needs all rows: each replica
then gets the whole batch.
"""

import contextlib
import functools
import logging
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives, Recording, using
from tfdist.collectives.differentiable import losses_weighted
from tfdist.data.batches import ReplicaRows, count_rows
from tfdist.distribution.strategy import HasCollectives
from tfdist.keras_fit.one_device import Replica, running
from tfdist.keras_fit.replica_batch import few_rows, warn_of_all_rows
from tfdist.keras_fit.replica_vs_full_batch import BothWays, NeedsAllRowsError, either_draws
from tfdist.keras_fit.step_outputs import ReduceOp, flat
from tfdist.layers.sync_batch_norm import is_synchronized, not_synchronized, synchronize
from tfdist.step import randomness
from tfdist.step.loss import floating
from tfdist.step.metrics import KerasMetrics
from tfdist.step.plain_variables import check_none_is_assigned
from tfdist.step.tolerance import Tolerance, norm

_log = logging.getLogger(__name__)
_PARTS = types.FunctionType | functools.partial | keras.Regularizer  # attributes of layers, such as an activation


class ReduceOps(NamedTuple):
    """How the replicas' values are combined into the value of the whole batch.

    Attributes:
      gradients: for each call of an optimizer's `apply` in a step, in order.
      logs: by name, for numbers that a step returns; missing ones are means.
      statistics: variables that a step assigns from its rows, which are means over replicas after each step: a later step
        may compute with them.
      needs_all_rows: whether neither means nor sums are right, so that each replica must compute the whole batch.
    """

    gradients: Sequence[ReduceOp] = ()
    logs: Mapping[str, ReduceOp] = {}
    statistics: Sequence[keras.Variable] = ()
    needs_all_rows: bool = False

    @property
    def of_gradients(self) -> ReduceOp:
        """How gradients of a step are combined; "mean" if its applications differ."""
        return "sum" if self.gradients and set(self.gradients) == {"sum"} else "mean"

    @property
    def are_means(self) -> bool:
        """Whether each value of the whole batch is a mean over rows."""
        return not self.needs_all_rows and {*self.gradients, *self.logs.values()} <= {"mean"}


class _Found(NamedTuple):
    """Results of one call of a step's code: gradients of each application, returned values, and values of variables.

    Weights and counters are not reduced over replicas.
    """

    gradients: list[list[tf.Tensor]]
    logs: dict[str, tf.Tensor]
    metrics: list[tf.Tensor]
    weights: list[tf.Tensor]
    statistics: list[tf.Tensor]
    counters: list[tf.Tensor]


def has_custom_code(model: keras.Model) -> bool:
    """Returns whether a model has losses, metrics or layers that are not Keras's, which are known to be right."""
    layers = [model, *keras_internals.layers_of(model)]
    if keras_internals.losses_of_all_rows(model) or any(
        keras_internals.operations_beside_layers(layer) for layer in layers
    ):
        return True
    inside = [part for layer in layers for part in vars(layer).values() if isinstance(part, _PARTS)]
    return any(keras_internals.is_own(part) for part in (*layers, *inside, *keras_internals.compiled_functions(model)))


def state_of_rows(model: keras.Model) -> str:
    """Describes the state that a model keeps for each row of a batch, which replicas cannot split; empty for none."""
    stateful = [layer for layer in keras_internals.layers_of(model) if getattr(layer, "stateful", False)]
    return f"{stateful[0].name} is stateful: it has a state for each row of a batch" if stateful else ""


class FirstBatch:
    """Compares the results of a model's step for rows distributed over replicas with those for all rows at once."""

    def __init__(
        self,
        model: keras.Model,
        strategy: HasCollectives,
        step: Callable[[Any], Any],
        name: str,
        results_of_metrics: Collection[str] | None,
    ):
        """Initializes the comparison.

        Args:
          model: compiled and built model.
          strategy: strategy on which it runs.
          step: its `train_step` or `test_step`.
          name: name of the step.
          results_of_metrics: names of the returned values that are results of metrics; None if all are.
        """
        self._model, self._strategy, self._step, self._name = model, strategy, step, name
        self._results_of_metrics = results_of_metrics
        self._model_metrics = KerasMetrics(model)
        self._metrics = self._model_metrics.variables
        self._weights = list(model.trainable_variables)
        self._statistics = [v for v in model.non_trainable_variables if tf.as_dtype(v.dtype).is_floating]
        self._counters = randomness.counters(model)
        self._tolerance = Tolerance.of(model)
        self._keys: list[str] = []
        self._applications: list[list[str]] = []
        self._weights_of_rows: list[str] = []
        self._communicates = False
        self._is_synchronized = any(is_synchronized(layer) for layer in keras_internals.layers_of(model))
        self._both = BothWays(strategy, self._called)

    def reduce_ops(self, batch: Any) -> ReduceOps | None:
        """Compares the results; warns if the code needs all rows of a batch.

        Args:
          batch: a `ReplicaRows` in the form that `Strategy.run` accepts.

        Returns:
          How to combine values; None if the batch has only one row, which shows nothing.
        """
        if int(self._both.first(batch.batch_size)) < 2:
            return None
        try:
            return either_draws(functools.partial(self._found, batch))
        except NeedsAllRowsError as error:
            warn_of_all_rows(self._model, self._name, str(error), self._strategy)
            return ReduceOps(needs_all_rows=True)

    def _found(self, batch: Any, rows_differ: bool) -> ReduceOps:
        with _statistics_of_all_rows(self._model):
            self._both.agree(self._of_different_lengths(batch))
            ours, whole = self._both.run(batch, rows_differ)
        weights, counters = ([self._strategy.local(value) for value in each] for each in (ours.weights, ours.counters))
        means, sums, spreads = self._reduced(ours._replace(weights=[], counters=[]), batch)
        found, problem = ReduceOps(), ""
        try:
            whole = tf.nest.map_structure(np.asarray, whole)
            self._compare_counters(counters, whole.counters)
            self._compare_variables(weights, means.statistics, whole)
            found = self._equal_ones(means, sums, whole)._replace(statistics=self._of_rows(spreads, whole))
        except NeedsAllRowsError as error:
            problem = str(error)
        self._both.agree(problem)
        return found

    def _of_different_lengths(self, batch: Any) -> str:
        leaves = [self._strategy.local(leaf)[0] for leaf in tf.nest.flatten(batch.batch) if leaf is not None]
        lengths = [int(count_rows(leaf)) for leaf in leaves]
        return (
            f"its tensors have {' and '.join(str(length) for length in lengths)} rows" if len(set(lengths)) > 1 else ""
        )

    def _equal_ones(self, means: _Found, sums: _Found, whole: _Found) -> ReduceOps:
        """Returns how values are combined into those for all rows."""
        gradients = [
            self._reduce_op(f"the gradients of {_named(paths)}", *found)
            for paths, *found in zip(self._applications, means.gradients, sums.gradients, whole.gradients, strict=True)
        ]
        logs = {
            key: self._reduce_op(f'"{key}", which it returns,', [means.logs[key]], [sums.logs[key]], [whole.logs[key]])
            for key in self._keys
        }
        if len(set(gradients)) > 1 and self._communicates:
            raise NeedsAllRowsError("some gradients would be sums over rows and some means, in layers that communicate")
        self._compare_metrics(sums.metrics, whole.metrics)
        return ReduceOps(gradients, logs)

    def _compare_variables(
        self, weights: Sequence[Sequence[tf.Tensor]], statistics: Sequence[np.ndarray], whole: _Found
    ) -> None:
        """Compares assigned variables: weights must stay equal on replicas, statistics are averaged over them."""
        if self._weights_of_rows:
            raise NeedsAllRowsError(f"it assigns {self._weights_of_rows[0]} from its rows, without an optimizer")
        named = zip(self._weights, weights, whole.weights, strict=True)
        pairs = [(variable, value, all_rows) for variable, values, all_rows in named for value in values]
        for variable, ours, all_rows in (*pairs, *zip(self._statistics, statistics, whole.statistics, strict=True)):
            if not self._tolerance.holds([np.asarray(ours)], [all_rows]):
                raise NeedsAllRowsError(_beside(f"{variable.path}, which it assigns,", [np.asarray(ours)], [all_rows]))

    def _compare_counters(self, counters: Sequence[Sequence[tf.Tensor]], whole: Sequence[np.ndarray]) -> None:
        """Compares assigned integers and booleans, which must stay equal on replicas."""
        for variable, values, all_rows in zip(self._counters, counters, whole, strict=True):
            if any(not np.array_equal(value, all_rows) for value in values):
                raise NeedsAllRowsError(
                    _beside(f"{variable.path}, which it assigns,", [np.asarray(values[0])], [all_rows])
                )

    def _of_rows(self, spreads: Sequence[np.ndarray], whole: _Found) -> list[keras.Variable]:
        """Returns the statistics that differ between replicas."""
        found = zip(self._statistics, spreads, whole.statistics, strict=True)
        return [variable for variable, spread, value in found if not self._tolerance.holds([value + spread], [value])]

    def _compare_metrics(self, sums: Sequence[np.ndarray], whole: Sequence[np.ndarray]) -> None:
        results = self._model_metrics.by_metric(whole)
        for key, value in self._model_metrics.by_metric(sums).items():
            ours, theirs = _parts(value), _parts(results[key])
            if not self._tolerance.holds(ours, theirs):
                raise NeedsAllRowsError(_beside(f'the metric "{key.partition("/")[2]}"', ours, theirs))

    def _reduce_op(
        self, what: str, mean: list[np.ndarray], total: list[np.ndarray], whole: list[np.ndarray]
    ) -> ReduceOp:
        if self._tolerance.holds(mean, whole):
            return "mean"
        if self._tolerance.holds(total, whole):
            _log.info("%s are sums over the rows of a batch, and are therefore summed over replicas.", what)
            return "sum"
        raise NeedsAllRowsError(_beside(what, mean, whole))

    def _reduced(self, ours: Any, batch: Any) -> tuple[_Found, _Found, list[np.ndarray]]:
        """Returns the means over replicas, weighted by rows, the sums, and how much statistics differ from their means."""

        def replica_function(found: _Found, own_rows: ReplicaRows) -> tuple[_Found, _Found, list[tf.Tensor]]:
            few = few_rows(own_rows, self._strategy.collectives)
            part = floating(few.rows) / floating(few.total)
            means, sums = _reduced(found, part, self._strategy.collectives)
            return means, sums, _spreads(found.statistics, means.statistics, part, self._strategy.collectives)

        reduced = tf.function(lambda *given: self._strategy.run(replica_function, *given), autograph=False)
        means, sums, spreads = tf.nest.map_structure(np.asarray, self._both.first(reduced(ours, batch)))
        return means, sums, spreads

    def _called(self, batch: Any, replica: Replica) -> _Found:
        gradients: list[list[tf.Tensor]] = []
        applications: list[list[str]] = []  # replicas of a process are traced in turns

        def apply(
            original: Any, optimizer: keras.Optimizer, given: Sequence[Any], variables: Sequence[keras.Variable]
        ) -> None:
            found = [(tf.convert_to_tensor(g), v) for g, v in zip(given, variables, strict=True) if g is not None]
            gradients.append([gradient for gradient, _ in found])
            applications.append([variable.path for _, variable in found])

        for variable in self._metrics:
            variable.assign(tf.zeros(variable.shape, variable.dtype))
        weight = floating(replica.rows) / floating(replica.batch_size)
        recording = Recording(replica.collectives)
        replica = replica._replace(apply=apply, collectives=recording, scales_losses=False)
        with using(recording), running(replica), losses_weighted(weight):
            operations = keras_internals.count_operations()
            returned = flat(self._step(batch) or {})
            check_none_is_assigned(self._model, self._strategy, operations)
        self._applications = applications
        if not replica.has_all_rows:
            self._weights_of_rows = self._assigned_from(batch, operations)
            self._communicates = self._has_layers_that_communicate(recording)
        logs = {
            key: floating(value)
            for key, value in returned.items()
            if not self._is_of_metric(key) and tf.convert_to_tensor(value).shape.is_fully_defined()
        }
        self._keys = [*logs]
        return _Found(
            gradients,
            logs,
            *(
                [tf.identity(v) for v in kept]
                for kept in (self._metrics, self._weights, self._statistics, self._counters)
            ),
        )

    def _assigned_from(self, batch: Any, operations: int) -> list[str]:
        """Returns the paths of the weights that the step may assign from its rows, if not in the first step."""
        rows = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor)]
        found = keras_internals.assigned_from(rows, operations, self._weights)
        return [variable.path for variable, is_assigned in zip(self._weights, found, strict=True) if is_assigned]

    def _is_of_metric(self, key: str) -> bool:
        return self._results_of_metrics is None or key in self._results_of_metrics

    def _has_layers_that_communicate(self, recording: Recording) -> bool:
        """Ignores batch normalization that is synchronized only for the comparison."""
        calls = [call for call in recording.calls if not call.name.removesuffix("/gradient").endswith("/moments")]
        return bool(calls) or self._is_synchronized


def _reduced(found: _Found, part: tf.Tensor, collectives: Collectives) -> tuple[_Found, _Found]:
    """Returns the means over replicas, weighted by rows, and the sums; metrics are sums in both."""

    def weighted(value: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        return tf.math.multiply_no_nan(value, tf.cast(weight, value.dtype))

    def of_replica(weight: tf.Tensor) -> _Found:
        values = found.gradients, found.logs, found.statistics
        gradients, logs, statistics = tf.nest.map_structure(lambda value: weighted(value, weight), values)
        return _Found(gradients, logs, found.metrics, [], statistics, [])

    both = of_replica(part), of_replica(floating(part > 0))
    values = tf.nest.flatten(both)
    numbers = [tf.cast(value, tf.float64 if value.dtype == tf.float64 else tf.float32) for value in values]
    totals = collectives.all_reduce(numbers, name="first_batch/values") if numbers else []
    means, sums = tf.nest.pack_sequence_as(both, totals)
    return means, sums


def _spreads(
    own: Sequence[tf.Tensor], means: Sequence[tf.Tensor], part: tf.Tensor, collectives: Collectives
) -> list[tf.Tensor]:
    """Returns how much each value differs from its mean, summed over replicas that have rows."""
    differences = [tf.abs(tf.cast(value, mean.dtype) - mean) for value, mean in zip(own, means, strict=True)]
    weighted = [tf.math.multiply_no_nan(value, tf.cast(part > 0, value.dtype)) for value in differences]
    return collectives.all_reduce(weighted, name="first_batch/spreads") if weighted else []


def _parts(result: Any) -> list[np.ndarray]:
    """Returns the numbers of a metric's result, which may be a dict."""
    return [np.asarray(part, "float64") for part in tf.nest.flatten(result)]


def _beside(what: str, ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> str:
    norms = [norm(np.asarray([norm(value) for value in values])) for values in (ours, theirs)]
    return f"{what} would be {norms[0]:.6g} on replicas and {norms[1]:.6g} on one device"


def _named(paths: Sequence[str]) -> str:
    return f"{paths[0]} and {len(paths) - 1} more" if len(paths) > 1 else "".join(paths)


@contextlib.contextmanager
def _statistics_of_all_rows(model: keras.Model) -> Iterator[None]:
    """Context in which Keras's batch normalization is synchronized, so that it does not cause a difference."""
    local = [
        layer
        for layer in keras_internals.layers_of(model)
        if type(layer) is keras.layers.BatchNormalization and not is_synchronized(layer)
    ]
    for layer in local:
        synchronize(layer)
    try:
        yield
    finally:
        for layer in local:
            not_synchronized(layer)
