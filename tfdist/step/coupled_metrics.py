"""Checks on some examples that a user's own metrics add up over batches, and over the rows that replicas compute on their own.

A run sums the variables of a metric over calls of the compiled loop, replicas and micro-steps. For a maximum, or the mean of a
value that depends on all rows of a batch together, such as a root of a mean, that gives another result. It cannot be read from
the code.
"""

import itertools
import operator
from collections.abc import Sequence
from typing import Any, Literal

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import OneReplica, using
from tfdist.distribution.strategy import Strategy
from tfdist.step.loss import floating
from tfdist.step.partial_batches import PartialResults, communicates, computed_for
from tfdist.step.scalar_metrics import scalars_weighted
from tfdist.step.tolerance import Tolerance

Coupling = Literal["batches", "rows"]


def coupled_metrics(
    strategy: Strategy | None, model: keras.Model, others: Sequence[Any], outputs: Any, replicas: int, micro_steps: int
) -> dict[str, Coupling]:
    """Returns the names of a user's compiled metrics that do not add up, and over what they do not.

    Without micro-steps, metrics may be computed from the rows of all replicas, by `tfdist.gather_rows`. If one of them
    communicates, none is compared over rows.

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

    def updated(first_row: tf.Tensor, part: Any) -> list[tuple[list[tf.Tensor], list[tf.Tensor]]]:
        share = floating(tf.shape(keras.tree.flatten(part[1])[0])[0]) / rows
        with using(OneReplica()), keras_internals.neutral(first_row), keras_internals.functions_inlined():
            with scalars_weighted(share):
                return _once_and_twice(model, metrics, *part)

    compute = computed_for(updated, given, strategy)
    is_divided = replicas * micro_steps > 1
    found = PartialResults.of(lambda part: compute(given, part), rows, in_parts=is_divided)
    tolerance = Tolerance.of_sums(model, keras.tree.flatten([found.full, outputs]))
    coupled: dict[str, Coupling] = {}
    for number, metric in enumerate(metrics):
        of_metric = found.each(operator.itemgetter(number))
        once, twice = of_metric.each(operator.itemgetter(0)), of_metric.each(operator.itemgetter(1))
        if not twice._replace(partitions=[[once.full, once.full]]).add_up(tolerance):
            coupled[metric.name] = "batches"
        elif is_divided and not once.add_up(tolerance):
            coupled[metric.name] = "rows"
    if micro_steps == 1 and coupled and communicates(lambda: _once_and_twice(model, metrics, *given), strategy):
        return {name: coupling for name, coupling in coupled.items() if coupling == "batches"}
    return coupled


def _once_and_twice(
    model: keras.Model, metrics: Sequence[keras.Metric], others: Sequence[Any], outputs: Any
) -> list[tuple[list[tf.Tensor], list[tf.Tensor]]]:
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
