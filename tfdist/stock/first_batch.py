"""What a model's own code makes of a batch, on replicas and on one device: compared at the first batch, before a step counts.

A replica computes with its rows alone. Whether its code takes the mean over them for the loss, or the sum, or something that
needs all rows at once (pairs in a batch, a mean over weights) cannot be read off the code. So some rows of the first batch
are computed twice, without chance and without effects: dealt to the replicas, and as one batch on each. What is equal as a
mean, or as a sum, is summed so from then on; what is neither is refused.
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
from tfdist.collectives import Collectives, OneReplica, Recording, using
from tfdist.data.batches import Dealt, count_rows, with_any_rows
from tfdist.engine_errors import one_line
from tfdist.errors import InputError
from tfdist.layers.sync_batch_norm import is_synchronized, not_synchronized, synchronize
from tfdist.loss import floating
from tfdist.metrics import KerasMetrics
from tfdist.stock.gathering import gathered
from tfdist.stock.logs import Law, flat
from tfdist.stock.one_device import Replica, running
from tfdist.strategy import HasCollectives

_log = logging.getLogger(__name__)
# By what layers compute in: how far norms may be apart, and which part of the largest norm may be rounding in smaller ones.
_TOLERANCES = {"float64": (1e-7, 1e-4), "float32": (2e-3, 1e-2), "float16": (0.05, 0.1), "bfloat16": (0.1, 0.1)}
_KNOWN = ("keras", "tfdist")  # whose code is taken to be right


class Laws(NamedTuple):
    """How the values of replicas make the value of the whole batch.

    Attributes:
      gradients: of each call of an optimizer's `apply` in a step, in order.
      logs: of each number that a step returns, by name; those that are not here are means.
    """

    gradients: Sequence[Law] = ()
    logs: Mapping[str, Law] = {}


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


class _StepFailed(Exception):
    """A step's code has failed on some of a batch's rows."""


class FirstBatch:
    """Compares what a model's step makes of rows that are dealt to replicas with what it makes of them at once."""

    def __init__(
        self,
        model: keras.Model,
        strategy: HasCollectives,
        step: Callable[[Any], Any],
        name: str,
        results_of_metrics: Collection[str],
    ):
        """Compares nothing yet.

        Args:
          model: compiled and built.
          strategy: where it runs.
          step: its `train_step` or `test_step`.
          name: of that.
          results_of_metrics: names of what it returns that are metrics' results.
        """
        self._model, self._strategy, self._step, self._name = model, strategy, step, name
        self._results_of_metrics = results_of_metrics
        self._model_metrics = KerasMetrics(model)
        self._metrics = self._model_metrics.variables
        restored = [*model.non_trainable_variables, *self._metrics]
        self._restored = list({id(variable): variable for variable in restored}.values())
        computed = {layer.compute_dtype for layer in keras_internals.layers_of(model)} | {keras.config.floatx()}
        self._tolerances = max(_TOLERANCES[dtype] for dtype in computed if dtype in _TOLERANCES)
        self._keys: list[str] = []
        self._applications: list[list[str]] = []

    def laws(self, batch: Any) -> Laws:
        """Compares.

        Args:
          batch: of `Dealt`, as `Strategy.run` takes it.

        Raises:
          InputError: the code needs all rows of a batch at once.
        """
        try:
            return self._laws(batch, rows_differ=True)
        except InputError:
            # Code that draws for other rows than the batch has, as for a real and a generated image of each, numbers them anew.
            return self._laws(batch, rows_differ=False)

    def _laws(self, batch: Any, rows_differ: bool) -> Laws:
        try:
            with _statistics_of_all_rows(self._model):
                dealt, summed, whole = self._compared(rows_differ)(batch)
        except _StepFailed as failed:
            raise self._needs_all_rows(str(failed)) from failed
        except tf.errors.InvalidArgumentError as error:
            raise self._needs_all_rows(f"{type(error).__name__}: {one_line(error.message)}") from error
        gradients = [
            self._law(f"the gradients of {_named(paths)}", *found)
            for paths, *found in zip(
                self._applications, dealt.gradients, summed.gradients, whole.gradients, strict=True
            )
        ]
        logs = {
            key: self._law(f'"{key}", which it returns,', [dealt.logs[key]], [summed.logs[key]], [whole.logs[key]])
            for key in self._keys
        }
        results = self._model_metrics.by_metric(whole.metrics)
        for key, value in self._model_metrics.by_metric(summed.metrics).items():
            ours, theirs = np.asarray(value, "float64"), np.asarray(results[key], "float64")
            if not self._equal([ours], [theirs]):
                raise self._needs_all_rows(_beside(f'the metric "{key.partition("/")[2]}"', [ours], [theirs]))
        return Laws(gradients, logs)

    def _law(self, what: str, mean: list[np.ndarray], total: list[np.ndarray], whole: list[np.ndarray]) -> Law:
        if self._equal(mean, whole):
            return "mean"
        if self._equal(total, whole):
            _log.info("%s are sums over the rows of a batch, and are added up over replicas as such.", what)
            return "sum"
        raise self._needs_all_rows(_beside(what, mean, whole))

    def _equal(self, ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> bool:
        relative, rounding = self._tolerances
        least = rounding * max((_norm(value) for value in theirs), default=0.0) + 1e-12
        return all(_norm(a - b) <= relative * max(_norm(b), least) for a, b in zip(ours, theirs, strict=True))

    def _needs_all_rows(self, received: str) -> InputError:
        return InputError(
            f"On replicas, {self._name} and the losses and metrics in it must be means or sums over rows, as each replica has "
            f"some rows of a batch alone. Received: {self._model.name}, for whose first batch this is not so: {received} "
            "Compute a value for each row, or use --strategy=single; --check_first_batch=false trains without this check."
        )

    def _compared(self, rows_differ: bool) -> Callable[[Any], Any]:
        @tf.function(autograph=False)
        def compared(batch: Any) -> Any:
            found = self._strategy.run(functools.partial(self._replica_function, rows_differ), batch)
            return tf.nest.map_structure(lambda value: self._strategy.local(value)[0], found)

        return lambda batch: tf.nest.map_structure(np.asarray, compared(batch))

    def _replica_function(self, rows_differ: bool, dealt: Dealt) -> tuple[_Found, _Found, _Found]:
        """What comes of the rows as means over replicas, as sums over replicas, and of all at once."""
        collectives = self._strategy.collectives
        mine = _fewer(with_any_rows(dealt).batch, collectives.size)
        rows = count_rows(mine)
        [everyones] = collectives.all_gather([rows[None]], name="first_batch/rows")
        total, first = tf.reduce_sum(everyones), tf.reduce_sum(everyones[: collectives.rank])
        whole_batch = gathered(mine, collectives)
        before = [tf.identity(variable) for variable in self._restored]
        ours = self._called(mine, rows, total, collectives, first if rows_differ else None)
        self._restore(before)
        whole = self._called(whole_batch, total, total, OneReplica(), 0 if rows_differ else None)
        self._restore(before)
        part = floating(rows) / floating(total)
        return _summed(ours, part, collectives), _summed(ours, floating(rows > 0), collectives), whole

    def _called(
        self,
        batch: Any,
        rows: tf.Tensor,
        batch_size: tf.Tensor,
        collectives: Collectives,
        first: int | tf.Tensor | None,
    ) -> _Found:
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
        spoken = Recording(collectives)
        with using(spoken), keras_internals.neutral(first), keras_internals.functions_inlined():
            with running(Replica(spoken, rows, batch_size, apply)):
                returned = flat(self._stepped(batch) or {})
        logs = {
            key: floating(value)
            for key, value in returned.items()
            if key not in self._results_of_metrics and tf.convert_to_tensor(value).shape.rank == 0
        }
        self._keys = [*logs]
        return _Found(gradients, logs, [tf.identity(variable) for variable in self._metrics])

    def _stepped(self, batch: Any) -> Any:
        """Calls the step, which could be traced for a whole batch, so that what fails now is its rows' number."""
        try:
            return self._step(batch)
        except (ValueError, TypeError) as error:
            raise _StepFailed(f"{type(error).__name__}: {one_line(str(error))}") from error

    def _restore(self, values: Sequence[tf.Tensor]) -> None:
        for variable, value in zip(self._restored, values, strict=True):
            variable.assign(value)


def _summed(found: _Found, part: tf.Tensor, collectives: Collectives) -> _Found:
    """The sum over replicas, each weighted; metrics, which are sums, as they are."""

    def weighted(value: tf.Tensor) -> tf.Tensor:
        return tf.math.multiply_no_nan(value, tf.cast(part, value.dtype))

    values = tf.nest.map_structure(weighted, (found.gradients, found.logs))
    flat_values = [*tf.nest.flatten(values), *found.metrics]
    numbers = [tf.cast(value, tf.float64 if value.dtype == tf.float64 else tf.float32) for value in flat_values]
    totals = collectives.all_reduce(numbers, name="first_batch/values") if numbers else []
    count = len(totals) - len(found.metrics)
    gradients, logs = tf.nest.pack_sequence_as(values, totals[:count])
    return _Found(gradients, logs, totals[count:])


def _fewer(batch: Any, size: int) -> Any:
    """The first rows of a batch: so few that all replicas' together are no more than one has."""
    count = tf.maximum(count_rows(batch) // size, 1)
    return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[:count], batch)


def _norm(value: np.ndarray) -> float:
    return float(np.linalg.norm(np.nan_to_num(value)))


def _beside(what: str, ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> str:
    norms = [_norm(np.asarray([_norm(value) for value in values])) for values in (ours, theirs)]
    return f"{what} would be {norms[0]:.6g} on replicas and {norms[1]:.6g} on one device."


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
