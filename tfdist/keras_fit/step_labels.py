"""Combination of the values that replicas compute in a model's step, derived from the operations of the step.

A replica computes with its own rows only. Whether a custom step takes their mean for the loss, or their sum, or something
that needs all rows at once (pairs in a batch, a mean over weights) is read from the traced step; see
`tfdist.row_semantics`. What needs all rows is partitioned or, if it cannot be, computed from all of them by each replica.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import RecordedCall, using
from tfdist.collectives.differentiable import losses_weighted
from tfdist.data.batches import count_rows, has_static_rows
from tfdist.errors.engine_errors import described
from tfdist.keras_fit.one_device import Apply, Replica, running
from tfdist.keras_fit.step_outputs import ReduceOp, flat
from tfdist.row_semantics import keras_parts
from tfdist.row_semantics.explanation import Combination, Labelled, noting_static_rows
from tfdist.row_semantics.sizes import COUNT
from tfdist.row_semantics.tracing import FAILURES, LabelledCollectives, Labels, labels_of, variables_of_state
from tfdist.row_semantics.values import Label, Replicated, ReplicatedPlusSum, Rows, is_zero, sum_power
from tfdist.step.loss import floating
from tfdist.step.metrics import KerasMetrics

_OPS: dict[int | None, ReduceOp] = {-1: "mean", 0: "sum"}  # by the power of a sum
_SAME = (Replicated(0), Replicated(None))


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


def state_of_rows(model: keras.Model) -> str:
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
    step_labels = _StepLabels(model, step, spec, results_of_metrics)
    ops = step_labels.reduce_ops("mean")
    if ops.needs_all_rows and step_labels.calls:  # in which gradients of sums have other weights
        of_sums = step_labels.reduce_ops("sum")
        return ops if of_sums.needs_all_rows else of_sums
    return ops


def not_of_rows(model: keras.Model, function: Callable[[Any], Any], spec: Any) -> str:
    """Returns why the outputs for rows depend on other rows; empty if they do not.

    Args:
      model: built model.
      function: function of a batch that returns outputs [rows, ...].
      spec: structure of `tf.TensorSpec` of a batch.
    """

    def called(batch: Any, size: tf.Tensor) -> Any:
        with _in_replica(model, LabelledCollectives(None), count_rows(batch), size):
            return function(batch)

    try:
        with noting_static_rows() as read:
            labels = labels_of(called, spec, [], model.non_trainable_variables)
    except FAILURES as error:
        return described(error)
    if read and has_static_rows(spec):
        return read[0]
    found = (label for label in tf.nest.flatten(labels.results) if label is not None)
    return next((Labelled("output", "", each, "").sentence for each in found if each != Rows(0, COUNT)), "")


class _StepLabels:
    """The labels of a model's step."""

    def __init__(
        self, model: keras.Model, step: Callable[[Any], Any], spec: Any, results_of_metrics: Collection[str] | None
    ):
        self._model, self._step, self._spec, self._results_of_metrics = model, step, spec, results_of_metrics
        self._metrics = KerasMetrics(model).variables
        self._weights = list(model.trainable_variables)
        self._state = list(model.non_trainable_variables)
        self.calls: Sequence[RecordedCall] = ()
        self._applications: list[list[str]] = []

    def reduce_ops(self, op: ReduceOp) -> ReduceOps:
        """Returns how values are combined, if losses are means or sums over rows."""
        variables = [*self._metrics, *self._weights, *self._state]
        state = variables_of_state(self._metrics, self._state)
        try:
            with noting_static_rows() as read:
                labels = labels_of(lambda batch, size: self._called(batch, size, op), self._spec, variables, state)
        except FAILURES as error:
            return ReduceOps(needs_all_rows=described(error))
        if read and has_static_rows(self._spec):
            return ReduceOps(needs_all_rows=read[0])
        gradients, logs = labels.results
        ops = [{_op(label) for label in each if not is_zero(label)} or {"mean"} for each in gradients]
        named = [each for pairs in zip(self._applications, gradients, strict=True) for each in zip(*pairs, strict=True)]
        values = [Labelled("gradient", path, label, _op(label)) for path, label in named]
        values += [Labelled("result", key, label, _op(label)) for key, label in logs.items()]
        of_variables = list(self._assigned(labels))
        values += [value for _, value in of_variables]
        reason = next((value.sentence for value in values if not value.op), "")
        if not reason and any(len(each) > 1 for each in ops):
            reason = "some gradients of an optimizer are sums over rows and some means"
        elif not reason and self.calls and any(each != {op} for each in ops):
            reason = "gradients are sums over rows and means, in layers that communicate"
        if reason:
            return ReduceOps(needs_all_rows=reason, values=values, calls=self.calls, without_rule=labels.without_rule)
        of_gradients = [of_one for each in ops for of_one in each if of_one]
        of_logs = {key: of_one for key, label in logs.items() if (of_one := _op(label))}
        statistics = [variable for variable, value in of_variables if value.op == "mean"]
        found = ReduceOps(of_gradients, of_logs, statistics)
        return found._replace(values=values, calls=self.calls, without_rule=labels.without_rule)

    def _called(self, batch: Any, size: tf.Tensor, op: ReduceOp) -> tuple[Any, dict[str, tf.Tensor]]:
        gradients: list[list[tf.Tensor]] = []
        self._applications = []

        def apply(
            original: Any, optimizer: keras.Optimizer, given: Sequence[Any], variables: Sequence[keras.Variable]
        ) -> None:
            pairs = [(tf.convert_to_tensor(g), v) for g, v in zip(given, variables, strict=True) if g is not None]
            gradients.append([gradient for gradient, _ in pairs])
            self._applications.append([variable.path for _, variable in pairs])

        rows = count_rows(batch)
        weight = floating(rows) / floating(size) if op == "mean" else None
        collectives = LabelledCollectives(weight)
        with _in_replica(self._model, collectives, rows, size, apply), losses_weighted(weight):
            returned = flat(self._step(batch) or {})
        self.calls = collectives.calls
        logs = {
            key: tf.convert_to_tensor(value)
            for key, value in returned.items()
            if not self._is_of_metric(key) and tf.convert_to_tensor(value).shape.is_fully_defined()
        }
        return gradients, logs

    def _is_of_metric(self, key: str) -> bool:
        return self._results_of_metrics is None or key in self._results_of_metrics

    def _assigned(self, labels: Labels) -> Iterator[tuple[Any, Labelled]]:
        """Yields the variables that a step assigns: sums of metrics, means over rows, and what is the same everywhere."""
        documented = {id(variable) for layer in keras_parts.normalizations(self._model) for variable in layer.variables}
        of_variables = zip([*self._metrics, *self._weights, *self._state], labels.variables, strict=True)
        metrics = {id(variable) for variable in self._metrics}
        for variable, label in of_variables:
            if label is None or id(variable) in documented:
                continue
            if id(variable) in metrics:
                adds_up = isinstance(label, ReplicatedPlusSum) and label.power == 0
                yield variable, Labelled("metric", variable.path, label, "sum" if adds_up else "")
            else:
                is_mean = tf.as_dtype(variable.dtype).is_floating and sum_power(label) == -1 and not variable.trainable
                op: Combination = "same" if label in _SAME else "mean" if is_mean else ""
                yield variable, Labelled("variable", variable.path, label, op)
        for label in labels.others:
            yield None, Labelled("variable", "a tf.Variable", label, "same" if label in _SAME else "")


@contextlib.contextmanager
def _in_replica(
    model: keras.Model, collectives: LabelledCollectives, rows: tf.Tensor, size: tf.Tensor, apply: Apply | None = None
) -> Iterator[None]:
    replica = Replica(collectives, rows, size, apply, scales_losses=False)
    with using(collectives), running(replica), keras_internals.functions_inlined(), keras_parts.declared(model):
        yield


def _op(label: Label) -> ReduceOp | Literal[""]:
    """Returns how values with a label are combined; "" for all rows."""
    return _OPS.get(-1 if is_zero(label) else sum_power(label), "")
