"""Checks on some examples that a user's own metrics add up over batches, and over the rows that replicas compute on their own.

A run sums the variables of a metric over calls of the compiled loop, replicas and micro-steps. For a maximum, or the mean of a
value that depends on all rows of a batch together, such as a root of a mean, that gives another result. It cannot be read from
the code.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import OneReplica, using
from tfdist.data.batches import count_rows
from tfdist.data.batches import part as part_of_batch
from tfdist.data.row_allocation import share
from tfdist.distribution.strategy import HasCollectives, Strategy
from tfdist.gradients import Bucketed, Sum
from tfdist.step.loss import floating
from tfdist.step.partial_batches import PartialResults, communicates, computed_for
from tfdist.step.scalar_metrics import scalars_weighted
from tfdist.step.tolerance import Tolerance

Coupling = Literal["batches", "rows"]
_OnceAndTwice = tuple[list[tf.Tensor], list[tf.Tensor]]  # the variables of a metric after one update, and after two


def coupled_metrics(
    strategy: Strategy | None, model: keras.Model, others: Sequence[Any], outputs: Any, replicas: int, micro_steps: int
) -> dict[str, Coupling]:
    """Returns the names of a user's compiled metrics that do not add up, and over what they do not.

    Without micro-steps, metrics may be computed from the rows of all replicas, by `tfdist.gather_rows`. If any of them
    communicates, every replica updates all of them with a row of its own, and the sums over replicas are compared.

    Args:
      strategy: on whose replicas the metrics are updated; None to update them outside of replicas.
      model: compiled and built model.
      others: y, or y and sample_weight: structures of tensors [rows, ...].
      outputs: structure of arrays [rows, ...], the outputs of the model.
      replicas: number of replicas.
      micro_steps: number of micro-steps. With one, on one replica, metrics need not add up over rows.
    """
    metrics = keras_internals.own_compiled_metrics(model)
    given = (tuple(others), keras.tree.map_structure(tf.convert_to_tensor, outputs))
    rows = len(keras.tree.flatten(outputs)[0])

    def updated(first_row: tf.Tensor, part: Any) -> list[_OnceAndTwice]:
        weight = floating(tf.shape(keras.tree.flatten(part[1])[0])[0]) / rows
        with keras_internals.neutral(first_row), keras_internals.functions_inlined(), scalars_weighted(weight):
            return _once_and_twice(model, metrics, *part)

    def updated_alone(first_row: tf.Tensor, part: Any) -> list[_OnceAndTwice]:
        with using(OneReplica()):
            return updated(first_row, part)

    compute = computed_for(updated_alone, given, strategy)
    is_divided = replicas * micro_steps > 1
    update = functools.partial(_once_and_twice, model, metrics, *given)
    if micro_steps == 1 < replicas and isinstance(strategy, HasCollectives) and communicates(update, strategy):
        summed = _summed_over_replicas(strategy, updated)
        found = [
            PartialResults(compute(given, batch), compute(given, batch), [[summed(given, batch)]])
            for batch in _batches(rows, strategy)
        ]
    else:
        found = [PartialResults.of(lambda part: compute(given, part), rows, in_parts=is_divided)]
    tolerance = Tolerance.of_sums(model, keras.tree.flatten([[each.full for each in found], outputs]))
    return {
        metric.name: coupling
        for number, metric in enumerate(metrics)
        if (coupling := _coupling([each.each(operator.itemgetter(number)) for each in found], tolerance))
    }


def _coupling(found: Sequence[PartialResults], tolerance: Tolerance) -> Coupling | None:
    """Returns over what the variables of a metric, after one update and after two, do not add up; None if they do."""
    for of_metric in found:
        once, twice = of_metric.each(operator.itemgetter(0)), of_metric.each(operator.itemgetter(1))
        if not twice._replace(partitions=[[once.full, once.full]]).add_up(tolerance):
            return "batches"
        if not once.add_up(tolerance):
            return "rows"
    return None


def _batches(rows: int, strategy: Strategy) -> list[slice]:
    """Returns batches of a row for each replica; all rows if they are fewer, or none if replicas need equal shares."""
    if rows < strategy.replicas:
        return [] if strategy.needs_equal_rows else [slice(0, rows)]
    size = strategy.replicas
    return [slice(first, first + size) for first in range(0, rows - size + 1, size)]


def _summed_over_replicas(
    strategy: HasCollectives, updated: Callable[[tf.Tensor, Any], list[_OnceAndTwice]]
) -> Callable[[Any, slice], Any]:
    """Returns a function that sums what replicas compute from their parts of some rows over all replicas.

    Args:
      strategy: strategy of the model.
      updated: takes the number of the first row, and rows.
    """

    def replica_function(first_row: tf.Tensor, batch: Any) -> Any:
        rank, size = tf.cast(strategy.collectives.rank, tf.int32), strategy.replicas
        first, _ = share(count_rows(batch), rank, size)
        values = updated(first_row + tf.cast(first, tf.int64), part_of_batch(batch, rank, size).batch)
        mine = tf.nest.flatten(values)
        totals = Bucketed(Sum()).reduce(mine, [], strategy.job_collectives, name="coupled_metrics").totals
        return tf.nest.pack_sequence_as(values, totals)

    compiled = strategy.compiled(lambda *batch: strategy.run(replica_function, *batch))

    def summed(given: Any, batch: slice) -> Any:
        own = keras.tree.map_structure(lambda leaf: leaf[batch], given)
        found = compiled(tf.constant(batch.start, tf.int64), own)
        return tf.nest.map_structure(lambda value: np.asarray(strategy.local(value)[0]), found)

    return summed


def _once_and_twice(
    model: keras.Model, metrics: Sequence[keras.Metric], others: Sequence[Any], outputs: Any
) -> list[_OnceAndTwice]:
    """Returns the variables of each metric after one update and after two with the same rows; they begin with zeros."""
    variables = [metric.variables for metric in metrics]
    zeros = [(variable, tf.zeros(variable.shape, variable.dtype)) for variable in itertools.chain(*variables)]
    y, weight = others if len(others) == 2 else (*others, None)
    states = []
    with keras.StatelessScope(state_mapping=zeros) as scope:
        for _ in range(2):
            keras_internals.update_metrics(model, y, outputs, weight)
            states.append([[scope.get_current_value(v) for v in of_metric] for of_metric in variables])
    return list(zip(*states, strict=True))
