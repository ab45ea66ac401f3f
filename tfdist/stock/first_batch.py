"""What a model's own code makes of a batch, on replicas and on one device: compared at the first batch, before a step counts.

A replica computes with its rows alone. Whether its code takes the mean over them for the loss, or the sum, or something that
needs all rows at once (pairs in a batch, a mean over weights) cannot be read off the code. So some rows of the first batch
are computed twice, without chance and without effects: dealt to the replicas, and as one batch on each. What is equal as a
mean, or as a sum, is reduced so from then on. What is neither needs all rows: each replica is given the whole batch then.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives, OneReplica, using
from tfdist.collectives.differentiable import losses_weighted
from tfdist.data.batches import Dealt, count_rows
from tfdist.engine_errors import one_line
from tfdist.layers.sync_batch_norm import is_synchronized, not_synchronized, synchronize
from tfdist.loss import floating
from tfdist.metrics import KerasMetrics
from tfdist.stock.gathering import gathered
from tfdist.stock.logs import Law, flat
from tfdist.stock.one_device import Replica, running
from tfdist.stock.replica_batch import fewer_rows, warn_of_all_rows
from tfdist.stock.tolerance import Tolerance, norm
from tfdist.strategy import HasCollectives

_log = logging.getLogger(__name__)
_KNOWN = ("keras", "tfdist")  # whose code is taken to be right


class Laws(NamedTuple):
    """How the values of replicas make the value of the whole batch.

    Attributes:
      gradients: of each call of an optimizer's `apply` in a step, in order.
      logs: of each number that a step returns, by name; those that are not here are means.
      needs_all_rows: whether there is no such law, so that each replica must compute the whole batch.
    """

    gradients: Sequence[Law] = ()
    logs: Mapping[str, Law] = {}
    needs_all_rows: bool = False

    @property
    def of_gradients(self) -> Law:
        """What the gradients of a step are; means if its applications differ."""
        return "sum" if self.gradients and set(self.gradients) == {"sum"} else "mean"

    @property
    def are_means(self) -> bool:
        """Whether each value of the whole batch is a mean over rows."""
        return not self.needs_all_rows and {*self.gradients, *self.logs.values()} <= {"mean"}


class _Found(NamedTuple):
    """What one call of a step's code gave: gradients of each application, what it returned, the sums that metrics keep."""

    gradients: list[list[tf.Tensor]]
    logs: dict[str, tf.Tensor]
    metrics: list[tf.Tensor]


def has_own_code(model: keras.Model) -> bool:
    """Whether a model's losses, metrics and layers are not all Keras's."""
    layers = [model, *keras_internals.layers_of(model)]
    return any(_is_own(part) for part in (*layers, *keras_internals.compiled_functions(model)))


def _is_own(part: Any) -> bool:
    kind = part if hasattr(part, "__name__") else type(part)
    return isinstance(part, keras.layers.Lambda) or getattr(kind, "__module__", "").partition(".")[0] not in _KNOWN


class _NeedsAllRowsError(Exception):
    """What a step's code makes of a batch is no mean and no sum over rows; says of what this is so."""


class FirstBatch:
    """Compares what a model's step makes of rows that are dealt to replicas with what it makes of them at once."""

    def __init__(
        self,
        model: keras.Model,
        strategy: HasCollectives,
        step: Callable[[Any], Any],
        name: str,
        results_of_metrics: Collection[str] | None,
    ):
        """Compares nothing yet.

        Args:
          model: compiled and built.
          strategy: where it runs.
          step: its `train_step` or `test_step`.
          name: of that.
          results_of_metrics: names of what it returns that are metrics' results; None if all are.
        """
        self._model, self._strategy, self._step, self._name = model, strategy, step, name
        self._results_of_metrics = results_of_metrics
        self._model_metrics = KerasMetrics(model)
        self._metrics = self._model_metrics.variables
        restored = [*model.non_trainable_variables, *self._metrics]
        self._restored = list({id(variable): variable for variable in restored}.values())
        self._tolerance = Tolerance.of(model)
        self._keys: list[str] = []
        self._applications: list[list[str]] = []

    def laws(self, batch: Any) -> Laws:
        """Compares; warns if the code needs all rows of a batch.

        Args:
          batch: of `Dealt`, as `Strategy.run` takes it.
        """
        try:
            return self._laws(batch, rows_differ=True)
        except _NeedsAllRowsError:
            pass
        try:
            # Code that draws for other rows than the batch has, as for a real and a generated image of each, numbers them anew.
            return self._laws(batch, rows_differ=False)
        except _NeedsAllRowsError as error:
            warn_of_all_rows(self._model, self._name, str(error), self._strategy)
            return Laws(needs_all_rows=True)

    def _laws(self, batch: Any, rows_differ: bool) -> Laws:
        try:
            with _statistics_of_all_rows(self._model):
                means, sums, whole = self._compared(rows_differ)(batch)
        except tf.errors.InvalidArgumentError as error:
            raise _NeedsAllRowsError(f"{type(error).__name__}: {one_line(error.message)}") from error
        gradients = [
            self._law(f"the gradients of {_named(paths)}", *found)
            for paths, *found in zip(self._applications, means.gradients, sums.gradients, whole.gradients, strict=True)
        ]
        logs = {
            key: self._law(f'"{key}", which it returns,', [means.logs[key]], [sums.logs[key]], [whole.logs[key]])
            for key in self._keys
        }
        if len(set(gradients)) > 1 and any(is_synchronized(layer) for layer in keras_internals.layers_of(self._model)):
            raise _NeedsAllRowsError(
                "some gradients would be sums over rows and some means, in layers that communicate"
            )
        self._compare_metrics(sums.metrics, whole.metrics)
        return Laws(gradients, logs)

    def _compare_metrics(self, sums: Sequence[np.ndarray], whole: Sequence[np.ndarray]) -> None:
        results = self._model_metrics.by_metric(whole)
        for key, value in self._model_metrics.by_metric(sums).items():
            ours, theirs = np.asarray(value, "float64"), np.asarray(results[key], "float64")
            if not self._tolerance.holds([ours], [theirs]):
                raise _NeedsAllRowsError(_beside(f'the metric "{key.partition("/")[2]}"', [ours], [theirs]))

    def _law(self, what: str, mean: list[np.ndarray], total: list[np.ndarray], whole: list[np.ndarray]) -> Law:
        if self._tolerance.holds(mean, whole):
            return "mean"
        if self._tolerance.holds(total, whole):
            _log.info("%s are sums over the rows of a batch, and are added up over replicas as such.", what)
            return "sum"
        raise _NeedsAllRowsError(_beside(what, mean, whole))

    def _compared(self, rows_differ: bool) -> Callable[[Any], Any]:
        @tf.function(autograph=False)
        def compared(batch: Any) -> Any:
            found = self._strategy.run(functools.partial(self._replica_function, rows_differ), batch)
            return tf.nest.map_structure(lambda value: self._strategy.local(value)[0], found)

        return lambda batch: tf.nest.map_structure(np.asarray, compared(batch))

    def _replica_function(self, rows_differ: bool, dealt: Dealt) -> tuple[_Found, _Found, _Found]:
        """What comes of the rows as means over replicas, as sums over replicas, and of all at once."""
        collectives = self._strategy.collectives
        mine = fewer_rows(dealt, collectives.size)
        rows = count_rows(mine)
        [everyones] = collectives.all_gather([rows[None]], name="first_batch/rows")
        total, first = tf.reduce_sum(everyones), tf.reduce_sum(everyones[: collectives.rank])
        whole_batch = gathered(mine, collectives)
        before = [tf.identity(variable) for variable in self._restored]
        ours = self._called(mine, Replica(collectives, rows, total), first if rows_differ else None)
        self._restore(before)
        whole = self._called(
            whole_batch, Replica(OneReplica(), total, total, has_all_rows=True), 0 if rows_differ else None
        )
        self._restore(before)
        return *_reduced(ours, floating(rows) / floating(total), collectives), whole

    def _called(self, batch: Any, replica: Replica, first: int | tf.Tensor | None) -> _Found:
        gradients: list[list[tf.Tensor]] = []
        self._applications = []

        def apply(
            original: Any, optimizer: keras.Optimizer, given: Sequence[Any], variables: Sequence[keras.Variable]
        ) -> None:
            found = [(tf.convert_to_tensor(g), v) for g, v in zip(given, variables, strict=True) if g is not None]
            gradients.append([gradient for gradient, _ in found])
            self._applications.append([variable.path for _, variable in found])

        for variable in self._metrics:
            variable.assign(tf.zeros(variable.shape, variable.dtype))
        with using(replica.collectives), keras_internals.neutral(first), keras_internals.functions_inlined():
            with running(replica._replace(apply=apply)):
                with losses_weighted(floating(replica.rows) / floating(replica.batch_size)):
                    returned = flat(self._stepped(batch) or {})
        logs = {
            key: floating(value)
            for key, value in returned.items()
            if not self._is_of_metric(key) and tf.convert_to_tensor(value).shape.rank == 0
        }
        self._keys = [*logs]
        return _Found(gradients, logs, [tf.identity(variable) for variable in self._metrics])

    def _is_of_metric(self, key: str) -> bool:
        return self._results_of_metrics is None or key in self._results_of_metrics

    def _stepped(self, batch: Any) -> Any:
        """Calls the step, which could be traced for a whole batch, so that what fails now is its rows' number."""
        try:
            return self._step(batch)
        except (ValueError, TypeError) as error:
            raise _NeedsAllRowsError(f"{type(error).__name__}: {one_line(str(error))}") from error

    def _restore(self, values: Sequence[tf.Tensor]) -> None:
        for variable, value in zip(self._restored, values, strict=True):
            variable.assign(value)


def _reduced(found: _Found, part: tf.Tensor, collectives: Collectives) -> tuple[_Found, _Found]:
    """The means over replicas, each weighted by its part of the rows, and the sums; metrics are sums in both."""

    def weighted(value: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        return tf.math.multiply_no_nan(value, tf.cast(weight, value.dtype))

    def of_replica(weight: tf.Tensor) -> _Found:
        gradients, logs = tf.nest.map_structure(lambda value: weighted(value, weight), (found.gradients, found.logs))
        return _Found(gradients, logs, found.metrics)

    both = of_replica(part), of_replica(floating(part > 0))
    values = tf.nest.flatten(both)
    numbers = [tf.cast(value, tf.float64 if value.dtype == tf.float64 else tf.float32) for value in values]
    totals = collectives.all_reduce(numbers, name="first_batch/values") if numbers else []
    means, sums = tf.nest.pack_sequence_as(both, totals)
    return means, sums


def _beside(what: str, ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> str:
    norms = [norm(np.asarray([norm(value) for value in values])) for values in (ours, theirs)]
    return f"{what} would be {norms[0]:.6g} on replicas and {norms[1]:.6g} on one device"


def _named(paths: Sequence[str]) -> str:
    return f"{paths[0]} and {len(paths) - 1} more" if len(paths) > 1 else "".join(paths)


@contextlib.contextmanager
def _statistics_of_all_rows(model: keras.Model) -> Iterator[None]:
    """Inside, Keras's batch normalization takes all replicas' rows, so that it is no reason for a difference."""
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
