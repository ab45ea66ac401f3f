"""Checks on some examples that rows of a batch do not depend on each other, as replicas that compute their own rows require.

A loss of a user, which returns one number for a batch, or what a layer adds by `add_loss`, may as well be a sum, or depend on
all rows together, and so may outputs. That cannot be read from the code, so results for a few rows are compared with those for
parts of them.
"""

import itertools
import logging
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import OneReplica, using
from tfdist.distribution.strategy import Strategy
from tfdist.layers.expert_load import ExpertLoad
from tfdist.pipelining.staged_model import StagedModel
from tfdist.step import loss
from tfdist.step.coupled_metrics import Coupling, coupled_metrics
from tfdist.step.coupled_state import coupled_state
from tfdist.step.data_mismatch import described
from tfdist.step.loss import floating
from tfdist.step.partial_batches import PartialResults, communicates, computed_for
from tfdist.step.scalar_metrics import scalars_weighted
from tfdist.step.tolerance import Tolerance

_ROWS = 8
_log = logging.getLogger(__name__)


class CoupledRows(NamedTuple):
    """What depends on several rows of a batch together.

    Attributes:
      losses: names of a user's own losses that are not means over rows.
      outputs: whether outputs for a row depend on the other rows of a replica.
      state: paths of what layers assign in training, of which the mean over replicas is not that of one device.
      metrics: names of a user's own metrics that do not add up, and of those that calls of the model update; see
        `coupled_metrics`.
      error: why the rows could not be compared; empty if they could.
    """

    losses: list[str]
    outputs: bool
    state: list[str] = []
    metrics: Mapping[str, Coupling] = types.MappingProxyType({})
    error: str = ""


class _Call(NamedTuple):
    """What a call of the model returns and adds.

    Attributes:
      outputs: the outputs, as arrays.
      added: for each layer that has added losses, these times the number of rows: numbers that add up over rows.
      metrics: for each metric that the call updates, its variables afterwards; they begin with zeros.
    """

    outputs: Any
    added: dict[str, list[np.ndarray]]
    metrics: dict[str, list[np.ndarray]]


def coupled_rows(
    strategy: Strategy, model: keras.Model, examples: Any, *, micro_steps: int, may_be_called: bool
) -> CoupledRows:
    """Returns what depends on several rows together, in evaluation, as far as some examples show it.

    Every process must call it. Replicas communicate only if a compiled metric does; variables have the same values afterwards.

    Args:
      strategy: strategy of the model.
      model: compiled and built model.
      examples: structure (x, y) or (x, y, sample_weight) of arrays [rows, ...].
      micro_steps: number of micro-steps. With one, on one replica, only metrics are compared.
      may_be_called: whether replicas have the whole model, without layouts. Otherwise compiled losses and metrics are
        compared for random outputs, and neither what layers add nor outputs are compared.
    """
    is_divided = strategy.replicas * micro_steps > 1
    flat = keras_internals.flat_losses(model) if is_divided else []
    compiled = [number for number, (_, of_one, _) in enumerate(flat) if not keras_internals.loss_form(of_one)[0]]
    has_own_code = is_divided and may_be_called and _has_own_code(model)
    has_own_metrics = bool(keras_internals.own_compiled_metrics(model))
    updated = keras_internals.metrics_updated_by_calls(model) if may_be_called else []
    own_updated = [name for name, metric in updated if keras_internals.is_own(metric)]
    rows = min(_ROWS, *(len(leaf) for leaf in keras.tree.flatten(examples)))
    if rows < 2 or not (compiled or has_own_code or has_own_metrics or own_updated):
        return CoupledRows([], outputs=False)
    x, *others = keras.tree.map_structure(lambda leaf: tf.convert_to_tensor(leaf[:rows]), tuple(examples))
    found = CoupledRows([], outputs=False)
    try:
        call = _forward(strategy, model, x) if may_be_called else None
        calls = PartialResults.of(call, rows, in_parts=has_own_code) if call and (has_own_code or own_updated) else None
        whole = calls.full.outputs if calls else call(slice(0, rows)).outputs if call else _random_outputs(model, rows)
        runner = strategy if may_be_called else None
        wrong = _compiled(runner, model, others, whole) if compiled else []
        found = found._replace(losses=[flat[number].loss.name for number in compiled if number in wrong])
        if calls is not None and has_own_code:
            found = _of_calls(found, calls, strategy, model, x)
        if calls is not None and own_updated:
            second = _forward(strategy, model, x, begin=calls.full.metrics)(slice(0, rows))
            once = calls.each(operator.attrgetter("metrics"))
            added = tf.nest.map_structure(np.subtract, second.metrics, once.full)
            over_batches = set(_not_adding_up(once._replace(partitions=[[added]]), Tolerance.of(model)))
            coupled = [name for name in own_updated if name in over_batches]
            found = found._replace(metrics={**found.metrics, **dict.fromkeys(coupled, "batches")})
        if has_own_metrics:
            of_metrics = coupled_metrics(runner, model, others, whole, strategy.replicas, micro_steps)
            found = found._replace(metrics={**found.metrics, **of_metrics})
        return found
    except Exception as error:  # for example, code for a certain number of rows: a step has it, or reports the error
        _log.debug("Rows could not be compared:", exc_info=True)
        return found._replace(error=described(error))


def _of_calls(found: CoupledRows, calls: PartialResults, strategy: Strategy, model: keras.Model, x: Any) -> CoupledRows:
    """Adds to `found` what calls of the model on some rows `x` and on parts of them show."""
    tolerance = Tolerance.of(model)
    if not _are_of_rows(calls.each(lambda call: keras.tree.flatten(call.outputs)), tolerance):
        return found._replace(outputs=not communicates(lambda: model(x, training=False), strategy))
    adding = _not_adding_up(calls.each(operator.attrgetter("added")), tolerance)
    found = found._replace(losses=found.losses + [f"what {name} adds" for name in adding])
    updated = _not_adding_up(calls.each(operator.attrgetter("metrics")), tolerance)
    if updated and not communicates(lambda: model(x, training=False), strategy):
        found = found._replace(metrics=dict.fromkeys(updated, "rows"))
    state = coupled_state(strategy, model, x, len(keras.tree.flatten(x)[0]))
    return found if state and communicates(lambda: model(x, training=True), strategy) else found._replace(state=state)


def _has_own_code(model: keras.Model) -> bool:
    """Returns whether a model computes with code of a user, whose rows may depend on each other."""
    layers = [model, *keras_internals.layers_of(model)]
    operations = itertools.chain(*map(keras_internals.operations_beside_layers, layers))
    return any(map(keras_internals.is_own, layers)) or any(map(keras_internals.may_couple_rows, operations))


def _are_of_rows(outputs: PartialResults, tolerance: Tolerance) -> bool:
    """Returns whether outputs of all rows are those of parts of them, as far as they are finite and repeatable.

    Args:
      outputs: lists of outputs.
      tolerance: tolerance of norms.
    """
    for number in range(len(outputs.full)):
        found = outputs.each(operator.itemgetter(number))
        whole = found.full
        compared = np.issubdtype(whole.dtype, np.floating) and whole.ndim and np.all(np.isfinite(whole))
        if not compared or not np.array_equal(whole, found.again):
            continue
        for parts in map(np.concatenate, found.partitions):
            if parts.shape == whole.shape and not tolerance.holds([parts], [whole]):
                return False
    return True


def _forward(
    strategy: Strategy, model: keras.Model, x: Any, begin: Mapping[str, list[np.ndarray]] | None = None
) -> Callable[[slice], _Call]:
    """Returns a function that calls the model on a part of the rows `x`.

    Args:
      strategy: strategy of the model.
      model: built model.
      x: structure of tensors [rows, ...].
      begin: values with which the variables of each metric begin; None for zeros, as in a run.
    """
    names: list[str] = []
    # Not those of this library's layers, which add up: they count choices that a rounding error may change.
    metrics = {
        name: metric.variables
        for name, metric in keras_internals.metrics_updated_by_calls(model)
        if not isinstance(metric, ExpertLoad)
    }
    all_rows = len(keras.tree.flatten(x)[0])

    def forward(first_row: tf.Tensor, rows: Any) -> Any:
        for name, variables in metrics.items():
            for number, variable in enumerate(variables):
                variable.assign(begin[name][number] if begin else tf.zeros(variable.shape, variable.dtype))
        share = floating(tf.shape(keras.tree.flatten(rows)[0])[0]) / all_rows
        with using(OneReplica()), keras_internals.neutral(first_row), keras_internals.functions_inlined():
            with scalars_weighted(share):
                outputs = model(rows, training=False)
            added = keras_internals.losses_by_layer(model)
        names[:] = [name for name, losses in added.items() for _ in losses]
        totals = [tf.reduce_sum(each) for losses in added.values() for each in losses]
        return outputs, totals, [[tf.identity(variable.value) for variable in each] for each in metrics.values()]

    compute = computed_for(forward, x, strategy)

    def call(part: slice) -> _Call:
        outputs, losses, updates = compute(x, part)
        added: dict[str, list[np.ndarray]] = {}
        for name, value in zip(names, losses, strict=True):
            added.setdefault(name, []).append(value * (part.stop - part.start))
        return _Call(outputs, added, dict(zip(metrics, updates, strict=True)))

    return call


def _compiled(strategy: Strategy | None, model: keras.Model, others: list[Any], outputs: Any) -> list[int]:
    """Returns the numbers of the compiled losses that do not add up, for given outputs."""

    def numbers(first_row: tf.Tensor, rows: Any) -> Any:
        (y, *weights), of_model = rows
        with using(OneReplica()), keras_internals.neutral(first_row), keras_internals.functions_inlined():
            terms = loss.terms(model, y, of_model, weights[0] if weights else None)
        return [[term.numerator, term.denominator] for term in terms]

    given = (tuple(others), keras.tree.map_structure(tf.convert_to_tensor, outputs))
    compute = computed_for(numbers, given, strategy)
    found = PartialResults.of(lambda part: compute(given, part), len(keras.tree.flatten(outputs)[0]))
    tolerance = Tolerance.of_sums(model, list(itertools.chain(*found.full)))
    add_up = [found.each(operator.itemgetter(number)).add_up(tolerance) for number in range(len(found.full))]
    return [number for number, adds_up in enumerate(add_up) if not adds_up]


def _not_adding_up(by_name: PartialResults, tolerance: Tolerance) -> list[str]:
    """Returns the names of results, dicts of lists of arrays, that do not add up."""
    return [name for name in by_name.full if not by_name.each(operator.itemgetter(name)).add_up(tolerance)]


def _random_outputs(model: keras.Model, rows: int) -> list[np.ndarray]:
    """Returns outputs that are probabilities along their last dim."""
    whole = model.whole if isinstance(model, StagedModel) else model
    found = []
    for output in whole.outputs:
        values = np.random.default_rng(0).uniform(0.05, 1.0, [rows, *output.shape[1:]])
        found.append((values / values.sum(axis=-1, keepdims=True)).astype(output.dtype))
    return found
