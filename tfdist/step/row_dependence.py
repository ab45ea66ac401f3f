"""Finds the parts of a model that depend on several rows of a batch, from the operations of its code.

Replicas and micro-steps each compute some rows. The result is the same as on one device if losses are means over rows,
outputs depend on single rows, and metrics add up; see `tfdist.row_semantics`.
"""

import contextlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import RecordedCall, using
from tfdist.data.batches import count_rows
from tfdist.errors.engine_errors import error_summary
from tfdist.pipelining.staged_model import full_model
from tfdist.row_semantics import keras_parts
from tfdist.row_semantics.explanation import Combination, Communication, LabelledValue, describe_label
from tfdist.row_semantics.sizes import COUNT
from tfdist.row_semantics.tracing import FAILURES, LabelledCollectives, Labels, labels_of, variables_of_state
from tfdist.row_semantics.values import REPLICATED, SUM, ZEROS, Label, ReplicatedPlusSum, Rows, sum_power, times_count
from tfdist.step import loss
from tfdist.step.loss import to_floatx
from tfdist.step.metrics import weight_scalars

Coupling = Literal["batches", "rows"]


@contextlib.contextmanager
def in_replica(model: keras.Model, collectives: LabelledCollectives) -> Iterator[None]:
    """Context in which a model's code is traced as on one replica."""
    with using(collectives), keras_internals.inline_functions(), keras_parts.declare_row_wise(model):
        yield


class RowDependence(NamedTuple):
    """The values of a model that depend on several rows of a batch.

    Attributes:
      values: outputs, losses, metrics and the state that layers assign in training, with their labels.
      metrics: names of metrics that do not add up over batches or over rows.
      error: reason why the code could not be traced for an unknown number of rows; empty if it could.
      calls: calls of collectives in the model's code.
      communication: communication of a partitioned step, or the reason why steps are not partitioned.
    """

    values: Sequence[LabelledValue] = ()
    metrics: Mapping[str, Coupling] = types.MappingProxyType({})
    error: str = ""
    calls: Sequence[RecordedCall] = ()
    communication: Communication = Communication(obstacle="it needs no rows of other replicas")

    @property
    def reasons(self) -> list[str]:
        """Reasons why the parts of a batch do not add up to the whole, except metrics that do not add up over batches."""
        violations = [value.sentence for value in self.values if not value.op and value.kind != "metric"]
        return violations + [
            f"the metric {name} does not add up over rows" for name, kind in self.metrics.items() if kind == "rows"
        ]

    @property
    def is_partitioned(self) -> bool:
        """Whether steps are partitioned."""
        return not self.communication.obstacle

    @property
    def description(self) -> str:
        """A sentence that explains why a step needs all rows, and what replicas communicate."""
        reason = self.reasons[0].rstrip(".")
        return f"needs all rows: {reason}. Besides gradients, replicas communicate {self.communication} in each step."

    def describe_coupled(self, kind: str) -> list[str]:
        """Describes the values of a kind that depend on several rows, such as losses that are not means."""
        values = [value for value in self.values if value.kind == kind and not value.op]
        return [f"{value.name}, which is {describe_label(value.label)}" for value in values]


def row_dependence(
    model: keras.Model, spec: Any, *, is_divided: bool, is_callable: bool, may_communicate: bool
) -> RowDependence:
    """Returns the values that depend on several rows.

    Args:
      model: compiled and built model.
      spec: structure (x, y) or (x, y, sample_weight) of `tf.TensorSpec` [rows, ...].
      is_divided: whether a batch is divided over replicas or into micro-steps. Otherwise only metrics are checked.
      is_callable: whether replicas have the whole model, without layouts. Otherwise only compiled losses and metrics are
        checked, not outputs, state and losses added by layers.
      may_communicate: whether code may gather the rows of all replicas.
    """
    forward_pass = _ForwardPass(model, is_callable, may_communicate)
    if not (is_divided or forward_pass.user_metrics):
        return RowDependence()
    try:
        return forward_pass.dependence(spec, is_divided)
    except FAILURES as error:  # for example, code for a certain number of rows
        return RowDependence(error=error_summary(error))


class _ForwardPass:
    """The forward pass of a model, its losses and metrics, traced with symbolic rows."""

    def __init__(self, model: keras.Model, is_callable: bool, may_communicate: bool):
        self._model, self._is_callable = model, is_callable
        self._collectives = LabelledCollectives(None, communicates=may_communicate)
        compiled_metrics = [(metric.name, metric) for metric in keras_internals.compiled_metrics(model)]
        call_metrics = keras_internals.metrics_updated_by_calls(model) if is_callable else []
        self._metrics = [*compiled_metrics, *call_metrics]
        user_metrics = {id(metric) for metric in keras_internals.custom_compiled_metrics(model)}
        user_metrics |= {id(metric) for _, metric in call_metrics if keras_internals.is_user_defined(metric)}
        self.user_metrics = user_metrics

    def dependence(self, spec: Any, is_divided: bool) -> RowDependence:
        """Returns the result of `row_dependence`."""
        variables = [variable for _, metric in self._metrics for variable in metric.variables]
        model_state = self._model.non_trainable_variables if self._is_callable else []
        state = variables_of_state(variables, model_state)
        outputs = () if self._is_callable else self._output_specs()
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
        if all(value.op for value in values):  # otherwise, values computed from them also depend on several rows
            values += _losses(loss_labels, layer_loss_labels)
            values += [*metric_values, *(self._state(spec) if self._is_callable else [])]
        else:
            metrics = {name: coupling for name, coupling in metrics.items() if coupling == "batches"}
        return RowDependence(values, metrics, calls=calls)

    def _evaluate(self, batch: Any, size: tf.Tensor) -> Any:
        ((x, y, *weights), outputs) = batch
        model, rows = self._model, count_rows(batch)
        with in_replica(model, self._collectives), weight_scalars(to_floatx(rows) / to_floatx(size)):
            outputs = model(x, training=False) if self._is_callable else outputs
            layer_losses = keras_internals.losses_by_layer(model) if self._is_callable else {}
            weight = weights[0] if weights else None
            terms = loss.terms(model, y, outputs, weight)
            loss.totals(terms, size, self._collectives)
            names = [flat.loss.name for flat in keras_internals.flat_losses(model)]
            keras_internals.update_metrics(model, y, outputs, weight)
        loss_terms = {
            f"{number}/{name}": [term.numerator, term.denominator]
            for number, (name, term) in enumerate(zip(names, terms, strict=True))
        }
        return outputs, loss_terms, layer_losses

    def _output_specs(self) -> Any:
        outputs = full_model(self._model).outputs
        specs = [tf.TensorSpec([None, *output.shape[1:]], output.dtype) for output in outputs]
        return specs if len(specs) > 1 else specs[0]

    def _coupled_metrics(self, labels: Labels, is_divided: bool) -> tuple[list[LabelledValue], dict[str, Coupling]]:
        values: list[LabelledValue] = []
        couplings: dict[str, Coupling] = {}
        variable_labels = iter(zip(labels.variables, labels.are_increments, strict=True))
        for name, metric in self._metrics:
            metric_labels = [next(variable_labels) for _ in metric.variables]
            if id(metric) in self.user_metrics and not all(increases for _, increases in metric_labels):
                couplings[name] = "batches"
            elif is_divided and not all(adds_up(label) for label, _ in metric_labels):
                couplings[name] = "rows"
            assigned_labels = sorted((label for label, _ in metric_labels if label is not None), key=adds_up)
            values += [
                LabelledValue("metric", name, label, "" if name in couplings else "sum")
                for label in assigned_labels[:1]
            ]
        return values, couplings

    def _state(self, spec: Any) -> list[LabelledValue]:
        """Returns the state that layers assign; state that replicas cannot average has no `op`.

        This is an integer that depends on the rows, a sum over rows, or a value other than a mean that later steps use. A
        variance, such as that of batch normalization, only describes a replica's rows.
        """
        variables = keras_internals.user_layer_state(self._model)
        if not variables:
            return []

        def train_forward(batch: Any, size: tf.Tensor) -> Any:
            with in_replica(self._model, self._collectives):
                return self._model(batch, training=True), self._model.losses

        labels = labels_of(train_forward, spec[0], variables, self._model.non_trainable_variables)

        def is_average(variable: keras.Variable, label: Label) -> bool:
            is_sum = label == SUM or isinstance(label, ReplicatedPlusSum)
            return sum_power(label) == -1 or not (is_sum or labels.is_used(variable))

        variable_labels = zip(variables, labels.variables, strict=True)
        return [labelled_state(v, label, is_average(v, label)) for v, label in variable_labels if label is not None]


def labelled_state(variable: keras.Variable, label: Label, is_average: bool) -> LabelledValue:
    """Labels state after a step; with `is_average`, replicas may average it if it is floating-point."""
    is_averaged = is_average and tf.as_dtype(variable.dtype).is_floating and not variable.trainable
    op: Combination = "same" if label in (REPLICATED, ZEROS) else "mean" if is_averaged else ""
    return LabelledValue("variable", variable.path, label, op)


def adds_up(label: Label | None) -> bool:
    """Returns whether a metric's variable is unassigned, or is only incremented by a sum over rows."""
    return label is None or (isinstance(label, ReplicatedPlusSum) and label.power == 0)


def _losses(
    loss_labels: Mapping[str, list[Label]], layer_loss_labels: Mapping[str, list[Label]]
) -> list[LabelledValue]:
    """Returns the losses. A loss has no `op` unless its numerator and denominator add up over rows."""
    named_labels = [(key.partition("/")[2], labels, 0) for key, labels in loss_labels.items()]
    named_labels += [(f"the loss added by {layer}", labels, -1) for layer, labels in layer_loss_labels.items()]
    losses = []
    for name, labels, power in named_labels:
        non_mean_labels = [label for label in labels if sum_power(label) != power and label != ZEROS]
        label = times_count((non_mean_labels or labels)[0], -1 - power)
        losses.append(LabelledValue("loss", name, label, "" if non_mean_labels else "mean"))
    return losses
