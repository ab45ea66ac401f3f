"""Derives how to combine the values of replicas from the operations of a model's step; see `tfdist.row_semantics`.

A replica computes its own rows only. A value of a custom step may be a mean or a sum over rows, or need all rows at once, like
pairs of rows or a mean over weights. A step that needs all rows is partitioned or, failing that, computed by each replica.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import RecordedCall
from tfdist.collectives.differentiable import loss_weight_scope
from tfdist.data.batches import count_rows, has_static_rows
from tfdist.errors import error_summary
from tfdist.keras_fit.one_device import Replica, replica_context
from tfdist.keras_fit.step_outputs import ReduceOp, flatten_logs
from tfdist.row_semantics import keras_parts
from tfdist.row_semantics.explanation import LabelledValue, record_static_row_reads
from tfdist.row_semantics.sizes import COUNT
from tfdist.row_semantics.tracing import FAILURES, LabelledCollectives, Labels, distinct_variables, labels_of
from tfdist.row_semantics.values import Label, Rows, is_zero, sum_power
from tfdist.step.loss import to_floatx
from tfdist.step.metrics import KerasMetrics
from tfdist.step.row_dependence import in_replica, is_additive, labeled_state, labeled_tf_variable
from tfdist.step.validation import inner_optimizer

_OPS: dict[int | None, ReduceOp] = {-1: "mean", 0: "sum"}  # by the power of a sum


class ReduceOps(NamedTuple):
    """How the values of replicas are combined into the values of the global batch."""

    gradients: Sequence[ReduceOp] = ()  # op for each call of an optimizer's `apply` in a step, in order
    logs: Mapping[str, ReduceOp] = {}  # op for each value that a step returns, by name; "mean" by default
    # Variables that a step assigns from its rows, which are averaged over replicas after each step
    statistics: Sequence[keras.Variable] = ()
    needs_all_rows: str = ""  # reason why neither means nor sums are correct; empty if they are
    static_rows: int | None = None  # static number of rows of a batch; None if it is unknown
    # Whether a step that needs all rows is partitioned; otherwise each replica computes the whole batch
    is_partitioned: bool = False
    values: Sequence[LabelledValue] = ()
    calls: Sequence[RecordedCall] = ()  # collective calls of the step's code, such as those of `tfdist.gather_rows`
    types_without_rule: Collection[str] = ()

    @property
    def gradient_op(self) -> ReduceOp:
        """The op for the gradients of a step; "mean" if it differs between applications."""
        return "sum" if self.gradients and set(self.gradients) == {"sum"} else "mean"

    @property
    def are_means(self) -> bool:
        """Whether each value of the global batch is a mean over rows."""
        return not self.needs_all_rows and {*self.gradients, *self.logs.values()} <= {"mean"}


def per_row_state(model: keras.Model) -> str:
    """Describes state that a model keeps for each row of a batch, which rules out dividing it; "" if there is none."""
    stateful_layers = [layer for layer in keras_internals.layers_of(model) if getattr(layer, "stateful", False)]
    return f"{stateful_layers[0].name} is stateful: it has a state for each row of a batch" if stateful_layers else ""


def reduce_ops(
    model: keras.Model, step: Callable[[Any], Any], spec: Any, results_of_metrics: Collection[str] | None
) -> ReduceOps:
    """Returns how to combine the values of a step of a compiled and built model.

    `results_of_metrics` are the names of the outputs that are results of metrics; None if all are.
    """
    arguments = model, step, spec, results_of_metrics
    ops = _combine(*arguments, "mean")
    if ops.needs_all_rows and ops.calls:  # in collective calls, gradients of sums have other weights
        sum_ops = _combine(*arguments, "sum")
        return ops if sum_ops.needs_all_rows else sum_ops
    return ops


def output_dependence(model: keras.Model, function: Callable[[Any], Any], spec: Any) -> str:
    """Returns the reason why a function's outputs for rows of a batch depend on other rows; empty if they do not.

    `spec` is a structure of `tf.TensorSpec` of a batch.
    """

    def call(batch: Any, size: tf.Tensor) -> Any:
        collectives = LabelledCollectives(None)
        with in_replica(model, collectives), replica_context(Replica(collectives, count_rows(batch), size)):
            return function(batch)

    labels = _labels(call, spec, [], model.non_trainable_variables)
    if isinstance(labels, str):
        return labels
    dependent = (label for label in tf.nest.flatten(labels.results) if label not in (None, Rows(0, COUNT)))
    return next((LabelledValue("output", "", label, "").sentence for label in dependent), "")


def _labels(call: Callable[..., Any], spec: Any, *variables: Sequence[keras.Variable]) -> Labels | str:
    """Returns the labels of a function's values, or the reason why they cannot be derived for every number of rows."""
    try:
        with record_static_row_reads() as notes:
            labels = labels_of(call, spec, *variables)
    except FAILURES as error:
        return error_summary(error)
    return notes[0] if notes and has_static_rows(spec) else labels


def _combine(
    model: keras.Model, step: Callable[[Any], Any], spec: Any, results_of_metrics: Collection[str] | None, op: ReduceOp
) -> ReduceOps:
    """Returns how to combine the values of a step whose losses are means or sums over rows; see `reduce_ops`."""
    metrics, state = KerasMetrics(model).variables, [*model.non_trainable_variables, *_learning_rates(model)]
    variables = [*metrics, *model.trainable_variables, *state]
    paths: list[list[str]] = []  # paths of the variables of each application of gradients
    calls: list[RecordedCall] = []

    def call(batch: Any, size: tf.Tensor) -> tuple[list[list[tf.Tensor]], dict[str, tf.Tensor]]:
        gradients: list[list[tf.Tensor]] = []

        def apply(optimizer: Any, grads: Sequence[Any], targets: Sequence[keras.Variable]) -> None:
            pairs = [(tf.convert_to_tensor(g), v.path) for g, v in zip(grads, targets, strict=True) if g is not None]
            gradients.append([gradient for gradient, _ in pairs])
            paths.append([path for _, path in pairs])

        rows = count_rows(batch)
        weight = to_floatx(rows) / to_floatx(size) if op == "mean" else None
        collectives = LabelledCollectives(weight)
        replica = Replica(collectives, rows, size, apply, scales_losses=False)
        with in_replica(model, collectives), replica_context(replica), loss_weight_scope(weight):
            outputs = flatten_logs(step(batch) or {})
        calls.extend(collectives.calls)
        metric_names = outputs if results_of_metrics is None else results_of_metrics
        logs = {key: tf.convert_to_tensor(value) for key, value in outputs.items() if key not in metric_names}
        return gradients, {key: value for key, value in logs.items() if value.shape.is_fully_defined()}

    labels = _labels(call, spec, variables, distinct_variables(metrics, state))
    if isinstance(labels, str):
        return ReduceOps(needs_all_rows=labels)
    gradients, logs = labels.results
    ops = [{_op(label) for label in application if not is_zero(label)} or {"mean"} for application in gradients]
    labels_by_path = zip(itertools.chain(*paths), itertools.chain(*gradients), strict=True)
    assignments = list(_assignments(model, metrics, variables, labels))
    values = [
        *(LabelledValue("gradient", path, label, _op(label)) for path, label in labels_by_path),
        *(LabelledValue("result", key, label, _op(label)) for key, label in logs.items()),
        *(value for _, value in assignments),
    ]
    reason = next((value.sentence for value in values if not value.op), "")
    if not reason and any(len(application_ops) > 1 for application_ops in ops):
        reason = "some gradients of an optimizer are sums over rows and some are means"
    elif not reason and calls and any(application_ops != {op} for application_ops in ops):
        reason = "some gradients are sums over rows and some are means, in layers that communicate"
    result = ReduceOps(needs_all_rows=reason, values=values, calls=calls, types_without_rule=labels.types_without_rule)
    if reason:
        return result
    return result._replace(
        gradients=[reduce_op for application_ops in ops for reduce_op in application_ops if reduce_op],
        logs={key: reduce_op for key, label in logs.items() if (reduce_op := _op(label))},
        statistics=[variable for variable, value in assignments if value.op == "mean"],
    )


def _assignments(
    model: keras.Model, metrics: Sequence[keras.Variable], variables: Sequence[keras.Variable], labels: Labels
) -> Iterator[tuple[Any, LabelledValue]]:
    """Yields the variables that a step assigns, with their labeled values."""
    normalization_ids = {id(variable) for layer in keras_parts.normalizations(model) for variable in layer.variables}
    metric_ids = {id(variable) for variable in metrics}
    rate_ids = {id(variable) for variable in _learning_rates(model)}  # used in the same step that assigns them
    for variable, label in zip(variables, labels.variables, strict=True):
        if label is None or id(variable) in normalization_ids:
            continue
        if id(variable) in metric_ids:
            yield variable, LabelledValue("metric", variable.path, label, "sum" if is_additive(label) else "")
        else:
            yield variable, labeled_state(variable, label, sum_power(label) == -1 and id(variable) not in rate_ids)
    for label in labels.tf_variables:
        yield None, labeled_tf_variable(label)


def _learning_rates(model: keras.Model) -> list[keras.Variable]:
    """Returns the learning rate of the model's optimizer, which a step may assign."""
    optimizer = inner_optimizer(model.optimizer)
    return [variable for variable in getattr(optimizer, "variables", ()) if variable.path.endswith("/learning_rate")]


def _op(label: Label) -> ReduceOp | Literal[""]:
    """Returns how to combine values with a label; "" if they need all rows."""
    return _OPS.get(-1 if is_zero(label) else sum_power(label), "")
