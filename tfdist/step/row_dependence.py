"""Finds the values of a model that depend on several rows of a batch, from the operations of its code.

Each replica and each micro-step processes some of the rows. The result is the same as on one device if losses are means
over rows, each output depends on a single row, and metrics are sums over rows; see `tfdist.row_semantics`.
"""

import contextlib
import functools
import logging
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import RecordedCall, collectives_scope
from tfdist.data.batches import count_rows, has_static_rows
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError, error_summary, with_argument_names
from tfdist.pipelining.staged_model import full_model
from tfdist.row_semantics import explanation, keras_parts
from tfdist.row_semantics.explanation import Combination, Communication, LabelledValue, record_static_row_reads
from tfdist.row_semantics.sizes import COUNT
from tfdist.row_semantics.tracing import FAILURES, LabelledCollectives, Labels, distinct_variables, labels_of
from tfdist.row_semantics.values import REPLICATED, SUM, ZEROS, Label, ReplicatedPlusSum, Rows, sum_power, times_count
from tfdist.step import loss
from tfdist.step.loss import to_floatx
from tfdist.step.metrics import weight_scalars
from tfdist.step.partitioned_step import Division

_log = logging.getLogger(__name__)

Coupling = Literal["batches", "rows"]


@contextlib.contextmanager
def in_replica(model: keras.Model, collectives: LabelledCollectives) -> Iterator[None]:
    """Context in which a model's code is traced as on one replica."""
    with collectives_scope(collectives), keras_internals.inline_functions(), keras_parts.declare_row_wise(model):
        yield


class RowDependence(NamedTuple):
    """The values of a model that depend on several rows of a batch."""

    # Outputs, losses, metrics and the state that layers assign in training, with their labels
    values: Sequence[LabelledValue] = ()
    # Names of metrics whose variables are not sums over batches or over rows
    metrics: Mapping[str, Coupling] = types.MappingProxyType({})
    error: str = ""  # reason why the code could not be traced for an unknown number of rows; empty if it could
    calls: Sequence[RecordedCall] = ()  # calls of collectives in the model's code
    # Communication of a partitioned step, or the reason why steps are not partitioned
    communication: Communication = Communication()
    division: Division = "own"  # the rows that each replica computes
    # Names of metrics whose variables are not sums over batches, and are therefore kept from batch to batch
    kept_metrics: Sequence[str] = ()

    @property
    def reasons(self) -> list[str]:
        """Reasons why the result for a batch cannot be computed separately for parts of it."""
        violations = [value.sentence for value in self.values if not value.op and value.kind != "metric"]
        metrics = [f"the metric {name} is not a sum over {kind}" for name, kind in self.metrics.items()]
        return [*filter(None, [self.error]), *violations, *metrics]

    def describe_coupled(self, kind: str) -> list[str]:
        """Describes the values of a kind that depend on several rows, such as losses that are not means."""
        values = [value for value in self.values if value.kind == kind and not value.op]
        return [f"{value.name}, which is {explanation.describe_label(value.label)}" for value in values]


def row_dependence(
    model: keras.Model, spec: Any, *, is_divided: bool, has_whole_model: bool, may_communicate: bool
) -> RowDependence:
    """Returns the values of a compiled and built model that depend on several rows.

    `spec` is a structure (x, y) or (x, y, sample_weight) of `tf.TensorSpec` [rows, ...]. Unless a batch `is_divided`
    over replicas or into micro-steps, only metrics are checked. Unless a replica `has_whole_model`, without layouts, only
    compiled losses and metrics are checked, but not outputs, state and losses added by layers. `may_communicate`
    indicates whether code may gather the rows of all replicas.
    """
    forward_pass = _ForwardPass(model, has_whole_model, may_communicate)
    if not (is_divided or forward_pass.user_metrics):
        return RowDependence()
    try:
        with record_static_row_reads() as static_reads:
            dependence = forward_pass.dependence(spec, is_divided)
    except FAILURES as error:  # for example, if the code requires a certain number of rows
        return RowDependence(error=error_summary(error))
    is_static = bool(static_reads) and is_divided and has_static_rows(spec)
    return dependence._replace(error=static_reads[0]) if is_static else dependence


def communicates(calls: Sequence[RecordedCall]) -> bool:
    """Returns whether a step communicates more than the denominators of its losses, which micro-steps cannot do."""
    return any(call.name != loss.DENOMINATORS for call in calls)


def log_no_effect(option: str, model: keras.Model, reason: str, strategy: Strategy) -> None:
    """Logs that an option has no effect because a step needs all rows."""
    if strategy.is_chief:
        text = f"{option} has no effect: a step of {model.name} needs all rows of a batch at once, because {reason}"
        _log.warning("%s.", with_argument_names(text.rstrip(".")))


def log_dependence(
    model: keras.Model, name: str, reason: str, plan: Communication, strategy: Strategy, rows: str = ""
) -> None:
    """Logs why a step needs all rows and how replicas compute it; raises `InputError` if `rows` (--rows) is "strict"."""
    text = f"{name} of {model.name} needs all rows of a batch: {reason.rstrip('.')}."
    remedy = (
        "make it a mean over rows, a sum over rows or a value for each row, or use tfdist.gather_rows to gather the rows that "
        "it compares; `tfdist explain` shows all values of the step."
    )
    if rows == "strict":
        remedy = f"To do so, {remedy}" if plan.obstacle else "Make the value a mean or a sum over rows."
        raise InputError(
            f"With --rows=strict, replicas may exchange only means and sums over rows. Received: {text} {remedy}"
        )
    if not strategy.is_chief:
        return
    if plan.obstacle:
        _log.warning("%s Every replica therefore %s. To split the work, %s", text, plan.whole_batch, remedy)
    else:
        _log.info("%s Besides gradients, replicas communicate %s in each step.", text, plan)


class _ForwardPass:
    """The forward pass of a model, its losses and metrics, traced with symbolic rows."""

    def __init__(self, model: keras.Model, has_whole_model: bool, may_communicate: bool):
        self._model, self._has_whole_model = model, has_whole_model
        self._collectives = LabelledCollectives(None, communicates=may_communicate)
        compiled_metrics = [(metric.name, metric) for metric in keras_internals.compiled_metrics(model)]
        self._metrics = keras_internals.named_metrics(model) if has_whole_model else compiled_metrics
        self.user_metrics = keras_internals.custom_metrics(model)

    def dependence(self, spec: Any, is_divided: bool) -> RowDependence:
        """Returns the result of `row_dependence`."""
        variables = [variable for _, metric in self._metrics for variable in metric.variables]
        model_state = self._model.non_trainable_variables if self._has_whole_model else []
        state = distinct_variables(variables, model_state)
        outputs: Any = ()
        if not self._has_whole_model:
            tensors = full_model(self._model).outputs
            outputs = [tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype) for tensor in tensors]
            outputs = outputs if len(outputs) > 1 else outputs[0]
        labels, calls = labels_of(self._evaluate, (tuple(spec), outputs), variables, state), self._collectives.calls[:]
        metric_values, metrics = self._coupled_metrics(labels, is_divided)
        if not is_divided:
            return RowDependence(metrics=metrics)
        output_labels, loss_labels, layer_loss_labels = labels.results
        values = [
            LabelledValue("output", self._model.name, label, "rows" if label == Rows(0, COUNT) else "")
            for label in tf.nest.flatten(output_labels)
            if label is not None
        ]
        assigned: list[LabelledValue] = []
        if self._has_whole_model and keras_internals.depends_on_training(self._model):
            (_, loss_labels, layer_loss_labels), assigned = self._train(spec, outputs)
        if all(value.op for value in values):  # otherwise, values computed from them also depend on several rows
            values += _losses(loss_labels, layer_loss_labels)
            values += [*metric_values, *assigned]
        else:
            metrics = {name: coupling for name, coupling in metrics.items() if coupling == "batches"}
        return RowDependence(values, metrics, calls=calls)

    def _evaluate(self, batch: Any, size: tf.Tensor, training: bool = False) -> Any:
        ((x, y, *weights), outputs) = batch
        model, rows = self._model, count_rows(batch)
        with in_replica(model, self._collectives), weight_scalars(to_floatx(rows) / to_floatx(size)):
            outputs = model(x, training=training) if self._has_whole_model else outputs
            layer_losses = keras_internals.losses_by_layer(model) if self._has_whole_model else {}
            weight = weights[0] if weights else None
            terms = loss.terms(model, y, outputs, weight)
            loss.totals(terms, size, self._collectives)
            names = [flat.loss.name for flat in keras_internals.flat_losses(model)]
            keras_internals.update_metrics(model, y, outputs, weight)
        pairs = enumerate(zip(names, terms, strict=True))
        loss_terms = {f"{number}/{name}": [term.numerator, term.denominator] for number, (name, term) in pairs}
        return outputs, loss_terms, layer_losses

    def _coupled_metrics(self, labels: Labels, is_divided: bool) -> tuple[list[LabelledValue], dict[str, Coupling]]:
        values: list[LabelledValue] = []
        couplings: dict[str, Coupling] = {}
        variable_labels = iter(zip(labels.variables, labels.are_increments, strict=True))
        for name, metric in self._metrics:
            metric_labels = [next(variable_labels) for _ in metric.variables]
            if id(metric) in self.user_metrics and not all(increases for _, increases in metric_labels):
                couplings[name] = "batches"
            elif is_divided and not all(is_additive(label) for label, _ in metric_labels):
                couplings[name] = "rows"
            assigned_labels = sorted((label for label, _ in metric_labels if label is not None), key=is_additive)
            op: Combination = "" if name in couplings else "sum"
            values += [LabelledValue("metric", name, label, op) for label in assigned_labels[:1]]
        return values, couplings

    def _train(self, spec: Any, outputs: Any) -> tuple[Any, list[LabelledValue]]:
        """Returns the labels of a training pass, and the state that layers assign; state that cannot be averaged has no `op`.

        Such state is a weight, an integer that depends on the rows, a sum over rows, or a value other than a mean that later
        steps use. A variance, such as that of batch normalization, describes only a replica's rows.
        """
        variables = [*keras_internals.user_layer_state(self._model), *self._model.trainable_variables]
        metrics = [variable for _, metric in self._metrics for variable in metric.variables]
        state = distinct_variables(metrics, self._model.non_trainable_variables)
        function = functools.partial(self._evaluate, training=True)
        labels = labels_of(function, (tuple(spec), outputs), variables, state)

        def is_average(variable: keras.Variable, label: Label) -> bool:
            is_sum = label == SUM or isinstance(label, ReplicatedPlusSum)
            return sum_power(label) == -1 or not (is_sum or labels.is_used(variable))

        pairs = [(v, label) for v, label in zip(variables, labels.variables, strict=True) if label is not None]
        values = [labeled_state(variable, label, is_average(variable, label)) for variable, label in pairs]
        return labels.results, [*values, *map(labeled_tf_variable, labels.tf_variables)]


def labeled_state(variable: keras.Variable, label: Label, is_average: bool) -> LabelledValue:
    """Labels state after a step; replicas may average it if it `is_average` and is floating-point."""
    is_averaged = is_average and tf.as_dtype(variable.dtype).is_floating and not variable.trainable
    op: Combination = "same" if label in (REPLICATED, ZEROS) else "mean" if is_averaged else ""
    return LabelledValue("variable", variable.path, label, op)


def labeled_tf_variable(label: Label) -> LabelledValue:
    """Labels the value that a step assigns to a TensorFlow variable."""
    return LabelledValue("variable", "a tf.Variable", label, "same" if label in (REPLICATED, ZEROS) else "")


def is_additive(label: Label | None) -> bool:
    """Returns whether a metric's variable is not assigned, or is only incremented by a sum over rows."""
    return label is None or (isinstance(label, ReplicatedPlusSum) and label.power == 0)


def _losses(
    loss_labels: Mapping[str, list[Label]], layer_loss_labels: Mapping[str, list[Label]]
) -> list[LabelledValue]:
    """Returns the losses. A loss has no `op` unless its numerator and denominator are sums over rows."""
    named_labels = [(key.partition("/")[2], labels, 0) for key, labels in loss_labels.items()]
    named_labels += [(f"the loss added by {layer}", labels, -1) for layer, labels in layer_loss_labels.items()]
    losses = []
    for name, labels, power in named_labels:
        non_mean_labels = [label for label in labels if sum_power(label) != power and label != ZEROS]
        label = times_count((non_mean_labels or labels)[0], -1 - power)
        losses.append(LabelledValue("loss", name, label, "" if non_mean_labels else "mean"))
    return losses
