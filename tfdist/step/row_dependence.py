"""Dependence of a model on several rows of a batch together, derived from the operations of its code.

Replicas compute their own rows, and micro-steps a part of them. That has the result of one device if losses are means over
rows, outputs are those of single rows, and metrics add up; see `tfdist.row_semantics`.
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
from tfdist.errors.engine_errors import described
from tfdist.pipelining.staged_model import full_model
from tfdist.row_semantics import keras_parts
from tfdist.row_semantics.explanation import Combination, Communication, Labelled, explained
from tfdist.row_semantics.sizes import COUNT
from tfdist.row_semantics.tracing import FAILURES, LabelledCollectives, Labels, labels_of, variables_of_state
from tfdist.row_semantics.values import REPLICATED, SUM, ZEROS, Label, ReplicatedPlusSum, Rows, sum_power, times_count
from tfdist.step import loss
from tfdist.step.loss import floating
from tfdist.step.metrics import scalars_weighted

Coupling = Literal["batches", "rows"]


@contextlib.contextmanager
def in_replica(model: keras.Model, collectives: LabelledCollectives) -> Iterator[None]:
    """Context in which a model's code is traced as that of one replica."""
    with using(collectives), keras_internals.functions_inlined(), keras_parts.declared(model):
        yield


class RowDependence(NamedTuple):
    """What depends on several rows of a batch together.

    Attributes:
      values: outputs, losses, metrics and the state that layers assign in training, with their labels.
      metrics: names of metrics that do not add up over batches, or not over rows.
      error: why the code could not be traced for an unknown number of rows; empty if it could.
      calls: what the code of the model communicates.
      communication: what replicas communicate in a partitioned step, or why it is none.
    """

    values: Sequence[Labelled] = ()
    metrics: Mapping[str, Coupling] = types.MappingProxyType({})
    error: str = ""
    calls: Sequence[RecordedCall] = ()
    communication: Communication = Communication(refused="it needs no rows of others")

    @property
    def reasons(self) -> list[str]:
        """Why parts of a batch have another result than the whole, other than metrics that do not add up over batches."""
        wrong = [value.sentence for value in self.values if not value.op and value.kind != "metric"]
        return wrong + [
            f"the metric {name} does not add up over rows" for name, kind in self.metrics.items() if kind == "rows"
        ]

    @property
    def is_partitioned(self) -> bool:
        """Whether steps are partitioned."""
        return not self.communication.refused

    @property
    def description(self) -> str:
        """Why a step needs all rows, and what replicas communicate, in words."""
        reason = self.reasons[0].rstrip(".")
        return f"needs all rows: {reason}. Besides gradients, replicas communicate {self.communication} in each step."

    def uncombined(self, kind: str) -> list[str]:
        """Returns the values of a kind that depend on several rows, such as losses that are no means, with what they are."""
        values = [value for value in self.values if value.kind == kind and not value.op]
        return [f"{value.name}, which is {explained(value.label)}" for value in values]


def row_dependence(
    model: keras.Model, spec: Any, *, is_divided: bool, may_be_called: bool, may_communicate: bool
) -> RowDependence:
    """Returns what depends on several rows together.

    Args:
      model: compiled and built model.
      spec: structure (x, y) or (x, y, sample_weight) of `tf.TensorSpec` [rows, ...].
      is_divided: whether a batch is divided, over replicas or in micro-steps. Otherwise only metrics are checked.
      may_be_called: whether replicas have the whole model, without layouts. Otherwise only compiled losses and metrics are
        checked, and not what layers add, outputs and state.
      may_communicate: whether code may gather the rows of all replicas.
    """
    forward_pass = _ForwardPass(model, may_be_called, may_communicate)
    if not (is_divided or forward_pass.user_metrics):
        return RowDependence()
    try:
        return forward_pass.dependence(spec, is_divided)
    except FAILURES as error:  # for example, code for a certain number of rows
        return RowDependence(error=described(error))


class _ForwardPass:
    """The forward pass of a model, its losses and metrics, traced with symbolic rows."""

    def __init__(self, model: keras.Model, may_be_called: bool, may_communicate: bool):
        self._model, self._may_be_called = model, may_be_called
        self._collectives = LabelledCollectives(None, communicates=may_communicate)
        compiled = [(metric.name, metric) for metric in keras_internals.compiled_metrics(model)]
        updated_by_calls = keras_internals.metrics_updated_by_calls(model) if may_be_called else []
        self._metrics = [*compiled, *updated_by_calls]
        user_metrics = {id(metric) for metric in keras_internals.own_compiled_metrics(model)}
        user_metrics |= {id(metric) for _, metric in updated_by_calls if keras_internals.is_user_defined(metric)}
        self.user_metrics = user_metrics

    def dependence(self, spec: Any, is_divided: bool) -> RowDependence:
        """See `row_dependence`."""
        variables = [variable for _, metric in self._metrics for variable in metric.variables]
        others = self._model.non_trainable_variables if self._may_be_called else []
        state = variables_of_state(variables, others)
        outputs = () if self._may_be_called else self._specs_of_outputs()
        labels, calls = labels_of(self._evaluate, (tuple(spec), outputs), variables, state), self._collectives.calls[:]
        metric_values, metrics = self._coupled_metrics(labels, is_divided)
        if not is_divided:
            return RowDependence(metrics=metrics)
        output_labels, loss_labels, added_labels = labels.results
        values = [
            Labelled("output", self._model.name, each, "rows" if each == Rows(0, COUNT) else "")
            for each in tf.nest.flatten(output_labels)
            if each is not None
        ]
        if all(value.op for value in values):  # otherwise, what is computed from them depends on several rows, too
            values += _losses(loss_labels, added_labels)
            values += [*metric_values, *(self._state(spec) if self._may_be_called else [])]
        else:
            metrics = {name: coupling for name, coupling in metrics.items() if coupling == "batches"}
        return RowDependence(values, metrics, calls=calls)

    def _evaluate(self, batch: Any, size: tf.Tensor) -> Any:
        ((x, y, *weights), outputs) = batch
        model, rows = self._model, count_rows(batch)
        with in_replica(model, self._collectives), scalars_weighted(floating(rows) / floating(size)):
            outputs = model(x, training=False) if self._may_be_called else outputs
            added = keras_internals.losses_by_layer(model) if self._may_be_called else {}
            weight = weights[0] if weights else None
            terms = loss.terms(model, y, outputs, weight)
            loss.totals(terms, size, self._collectives)
            names = [flat.loss.name for flat in keras_internals.flat_losses(model)]
            keras_internals.update_metrics(model, y, outputs, weight)
        loss_terms = {
            f"{number}/{name}": [term.numerator, term.denominator]
            for number, (name, term) in enumerate(zip(names, terms, strict=True))
        }
        return outputs, loss_terms, added

    def _specs_of_outputs(self) -> Any:
        outputs = full_model(self._model).outputs
        specs = [tf.TensorSpec([None, *output.shape[1:]], output.dtype) for output in outputs]
        return specs if len(specs) > 1 else specs[0]

    def _coupled_metrics(self, labels: Labels, is_divided: bool) -> tuple[list[Labelled], dict[str, Coupling]]:
        values: list[Labelled] = []
        coupled: dict[str, Coupling] = {}
        variable_labels = iter(zip(labels.variables, labels.are_increments, strict=True))
        for name, metric in self._metrics:
            labels_of_metric = [next(variable_labels) for _ in metric.variables]
            if id(metric) in self.user_metrics and not all(increases for _, increases in labels_of_metric):
                coupled[name] = "batches"
            elif is_divided and not all(adds_up(label) for label, _ in labels_of_metric):
                coupled[name] = "rows"
            assigned = sorted((label for label, _ in labels_of_metric if label is not None), key=adds_up)
            values += [Labelled("metric", name, label, "" if name in coupled else "sum") for label in assigned[:1]]
        return values, coupled

    def _state(self, spec: Any) -> list[Labelled]:
        """Returns the state that layers assign; what replicas cannot average has no `op`.

        That is an integer that depends on the rows; a sum over them; and what is no mean, if later steps compute with it.
        A variance, such as one of batch normalization, only describes a replica's own rows.
        """
        variables = keras_internals.own_state(self._model)
        if not variables:
            return []

        def trained(batch: Any, size: tf.Tensor) -> Any:
            with in_replica(self._model, self._collectives):
                return self._model(batch, training=True), self._model.losses

        labels = labels_of(trained, spec[0], variables, self._model.non_trainable_variables)

        def is_average(variable: keras.Variable, label: Label) -> bool:
            is_sum = label == SUM or isinstance(label, ReplicatedPlusSum)
            return sum_power(label) == -1 or not (is_sum or labels.is_used(variable))

        variable_labels = zip(variables, labels.variables, strict=True)
        return [labelled_state(v, label, is_average(v, label)) for v, label in variable_labels if label is not None]


def labelled_state(variable: keras.Variable, label: Label, is_average: bool) -> Labelled:
    """Returns the value of state after a step; `is_average`: whether replicas may average it, if it is floating-point."""
    is_averaged = is_average and tf.as_dtype(variable.dtype).is_floating and not variable.trainable
    op: Combination = "same" if label in (REPLICATED, ZEROS) else "mean" if is_averaged else ""
    return Labelled("variable", variable.path, label, op)


def adds_up(label: Label | None) -> bool:
    """Returns whether a metric's variable is not assigned, or only has a sum over rows added to it."""
    return label is None or (isinstance(label, ReplicatedPlusSum) and label.power == 0)


def _losses(loss_labels: Mapping[str, list[Label]], added: Mapping[str, list[Label]]) -> list[Labelled]:
    """Returns the losses; what is no mean over rows has no `op`: numerator and denominator must add up."""
    named_labels = [(key.partition("/")[2], labels, 0) for key, labels in loss_labels.items()]
    named_labels += [(f"what {layer} adds", labels, -1) for layer, labels in added.items()]
    losses = []
    for name, labels, power in named_labels:
        wrong = [label for label in labels if sum_power(label) != power and label != ZEROS]
        label = times_count((wrong or labels)[0], -1 - power)
        losses.append(Labelled("loss", name, label, "" if wrong else "mean"))
    return losses
