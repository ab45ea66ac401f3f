"""Combination of the values that replicas compute in a model's step, derived from the operations of the step.

A replica computes with its own rows only. Whether a custom step takes their mean for the loss, or their sum, or something
that needs all rows at once (pairs in a batch, a mean over weights) is read from the traced step; see
`tfdist.row_semantics`. What needs all rows is partitioned or, if it cannot be, computed from all of them by each replica.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import RecordedCall
from tfdist.collectives.differentiable import losses_weighted
from tfdist.data.batches import count_rows, has_static_rows
from tfdist.errors.engine_errors import described
from tfdist.keras_fit.one_device import Replica, running
from tfdist.keras_fit.step_outputs import ReduceOp, flattened
from tfdist.row_semantics import keras_parts
from tfdist.row_semantics.explanation import Labelled, noting_static_rows
from tfdist.row_semantics.sizes import COUNT
from tfdist.row_semantics.tracing import FAILURES, LabelledCollectives, Labels, labels_of, variables_of_state
from tfdist.row_semantics.values import REPLICATED, ZEROS, Label, Rows, is_zero, sum_power
from tfdist.step.loss import floating
from tfdist.step.metrics import KerasMetrics
from tfdist.step.row_dependence import adds_up, in_replica, labelled_state

_OPS: dict[int | None, ReduceOp] = {-1: "mean", 0: "sum"}  # by the power of a sum


class ReduceOps(NamedTuple):
    """How the replicas' values are combined into the value of the whole batch.

    Attributes:
      gradients: for each call of an optimizer's `apply` in a step, in order.
      logs: by name, for numbers that a step returns; missing ones are means.
      statistics: variables that a step assigns from its rows, which are means over replicas after each step: a later step
        may compute with them.
      needs_all_rows: why neither means nor sums are right; empty if they are.
      static_rows: number of rows of a batch that TensorFlow knows when code is traced; None if it is unknown.
      partitioned: whether a step that needs all rows is partitioned; otherwise each replica computes the whole batch.
      values: the values, with their labels.
      calls: what the step's code communicates, as by `tfdist.gather_rows`.
      without_rule: types of its operations that have no rule.
    """

    gradients: Sequence[ReduceOp] = ()
    logs: Mapping[str, ReduceOp] = {}
    statistics: Sequence[keras.Variable] = ()
    needs_all_rows: str = ""
    static_rows: int | None = None
    partitioned: bool = False
    values: Sequence[Labelled] = ()
    calls: Sequence[RecordedCall] = ()
    without_rule: Collection[str] = ()

    @property
    def of_gradients(self) -> ReduceOp:
        """How gradients of a step are combined; "mean" if its applications differ."""
        return "sum" if self.gradients and set(self.gradients) == {"sum"} else "mean"

    @property
    def are_means(self) -> bool:
        """Whether each value of the whole batch is a mean over rows."""
        return not self.needs_all_rows and {*self.gradients, *self.logs.values()} <= {"mean"}


def per_row_state(model: keras.Model) -> str:
    """Describes the state that a model keeps for each row of a batch, which replicas cannot split; empty for none."""
    stateful = [layer for layer in keras_internals.layers_of(model) if getattr(layer, "stateful", False)]
    return f"{stateful[0].name} is stateful: it has a state for each row of a batch" if stateful else ""


def reduce_ops(
    model: keras.Model, step: Callable[[Any], Any], spec: Any, results_of_metrics: Collection[str] | None
) -> ReduceOps:
    """Returns how the values of a step are combined.

    Args:
      model: compiled and built model.
      step: its `train_step` or `test_step`.
      spec: structure of `tf.TensorSpec` of a batch.
      results_of_metrics: names of the returned values that are results of metrics; None if all are.
    """
    arguments = model, step, spec, results_of_metrics
    ops = _combined(*arguments, "mean")
    if ops.needs_all_rows and ops.calls:  # in which gradients of sums have other weights
        of_sums = _combined(*arguments, "sum")
        return ops if of_sums.needs_all_rows else of_sums
    return ops


def output_dependence(model: keras.Model, function: Callable[[Any], Any], spec: Any) -> str:
    """Returns why the outputs for rows depend on other rows; empty if they do not.

    Args:
      model: built model.
      function: function of a batch that returns outputs [rows, ...].
      spec: structure of `tf.TensorSpec` of a batch.
    """

    def called(batch: Any, size: tf.Tensor) -> Any:
        collectives = LabelledCollectives(None)
        with in_replica(model, collectives), running(Replica(collectives, count_rows(batch), size)):
            return function(batch)

    try:
        with noting_static_rows() as notes:
            labels = labels_of(called, spec, [], model.non_trainable_variables)
    except FAILURES as error:
        return described(error)
    if notes and has_static_rows(spec):
        return notes[0]
    output_labels = (label for label in tf.nest.flatten(labels.results) if label is not None)
    return next((Labelled("output", "", each, "").sentence for each in output_labels if each != Rows(0, COUNT)), "")


def _combined(
    model: keras.Model,
    step: Callable[[Any], Any],
    spec: Any,
    results_of_metrics: Collection[str] | None,
    op: ReduceOp,
) -> ReduceOps:
    """Returns how the values of a step are combined, if losses are means or sums over rows; see `reduce_ops`."""
    metrics, state = KerasMetrics(model).variables, model.non_trainable_variables
    variables = [*metrics, *model.trainable_variables, *state]
    paths: list[list[str]] = []  # of the variables of each application
    calls: list[RecordedCall] = []

    def called(batch: Any, size: tf.Tensor) -> tuple[list[list[tf.Tensor]], dict[str, tf.Tensor]]:
        gradients: list[list[tf.Tensor]] = []

        def apply(optimizer: Any, grads: Sequence[Any], updated: Sequence[keras.Variable]) -> None:
            pairs = [(tf.convert_to_tensor(g), v.path) for g, v in zip(grads, updated, strict=True) if g is not None]
            gradients.append([gradient for gradient, _ in pairs])
            paths.append([path for _, path in pairs])

        rows = count_rows(batch)
        weight = floating(rows) / floating(size) if op == "mean" else None
        collectives = LabelledCollectives(weight)
        replica = Replica(collectives, rows, size, apply, scales_losses=False)
        with in_replica(model, collectives), running(replica), losses_weighted(weight):
            returned = flattened(step(batch) or {})
        calls.extend(collectives.calls)
        own = {} if results_of_metrics is None else {k: v for k, v in returned.items() if k not in results_of_metrics}
        logs = {key: tf.convert_to_tensor(value) for key, value in own.items()}
        return gradients, {key: value for key, value in logs.items() if value.shape.is_fully_defined()}

    try:
        with noting_static_rows() as notes:
            labels = labels_of(called, spec, variables, variables_of_state(metrics, state))
    except FAILURES as error:
        return ReduceOps(needs_all_rows=described(error))
    if notes and has_static_rows(spec):
        return ReduceOps(needs_all_rows=notes[0])
    gradients, logs = labels.results
    ops = [{_op(label) for label in each if not is_zero(label)} or {"mean"} for each in gradients]
    named = [pair for application in zip(paths, gradients, strict=True) for pair in zip(*application, strict=True)]
    assigned = list(_assigned(model, metrics, variables, labels))
    values = [
        *(Labelled("gradient", path, label, _op(label)) for path, label in named),
        *(Labelled("result", key, label, _op(label)) for key, label in logs.items()),
        *(value for _, value in assigned),
    ]
    reason = next((value.sentence for value in values if not value.op), "")
    if not reason and any(len(each) > 1 for each in ops):
        reason = "some gradients of an optimizer are sums over rows and some means"
    elif not reason and calls and any(each != {op} for each in ops):
        reason = "gradients are sums over rows and means, in layers that communicate"
    result = ReduceOps(needs_all_rows=reason, values=values, calls=calls, without_rule=labels.without_rule)
    if reason:
        return result
    return result._replace(
        gradients=[reduce_op for each in ops for reduce_op in each if reduce_op],
        logs={key: reduce_op for key, label in logs.items() if (reduce_op := _op(label))},
        statistics=[variable for variable, value in assigned if value.op == "mean"],
    )


def _assigned(
    model: keras.Model, metrics: Sequence[keras.Variable], variables: Sequence[keras.Variable], labels: Labels
) -> Iterator[tuple[Any, Labelled]]:
    """Yields the variables that a step assigns: sums of metrics, means over rows, and what is the same everywhere."""
    documented = {id(variable) for layer in keras_parts.normalizations(model) for variable in layer.variables}
    of_metrics = {id(variable) for variable in metrics}
    for variable, label in zip(variables, labels.variables, strict=True):
        if label is None or id(variable) in documented:
            continue
        if id(variable) in of_metrics:
            yield variable, Labelled("metric", variable.path, label, "sum" if adds_up(label) else "")
        else:
            yield variable, labelled_state(variable, label, sum_power(label) == -1)
    for label in labels.others:
        yield None, Labelled("variable", "a tf.Variable", label, "same" if label in (REPLICATED, ZEROS) else "")


def _op(label: Label) -> ReduceOp | Literal[""]:
    """Returns how values with a label are combined; "" for all rows."""
    return _OPS.get(-1 if is_zero(label) else sum_power(label), "")
