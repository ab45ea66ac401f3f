"""A model's step as one device computes it, partitioned by rows: for code that compares or divides what replicas have in part.

The step is traced as for one device, and emitted again for each replica, with the sums and rows of other replicas that its
operations need; see `tfdist.row_semantics.partitioning`.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives, OneReplica, Recording, using
from tfdist.collectives.counted_rows import counting
from tfdist.collectives.recording import RecordedCall
from tfdist.data.batches import count_rows
from tfdist.data.replica_rows import ReplicaRows
from tfdist.distribution.strategy import HasCollectives
from tfdist.errors.byte_sizes import byte_size
from tfdist.errors.counts import count_of
from tfdist.errors.engine_errors import described
from tfdist.keras_fit.one_device import Replica, running
from tfdist.keras_fit.replica_batch import check_not_strict, say_all_rows
from tfdist.keras_fit.step_outputs import flat
from tfdist.row_semantics import keras_parts
from tfdist.row_semantics.partitioning import NotPartitionedError, Partitioned
from tfdist.row_semantics.tracing import FAILURES, Trace, traced, variables_of_state
from tfdist.step.metrics import KerasMetrics

_log = logging.getLogger(__name__)


class Application(NamedTuple):
    """The call of an optimizer's `apply` in a step.

    Attributes:
      original: what the call was made to.
      optimizer: the optimizer.
      gradients: in `StepResult`, a replica's shares: their sums over replicas are the gradients of the batch.
      variables: the variables.
    """

    original: Callable[..., Any]
    optimizer: keras.Optimizer
    gradients: Sequence[tf.Tensor]
    variables: Sequence[keras.Variable]


class StepResult(NamedTuple):
    """What a step computes on each replica.

    Attributes:
      logs: values that the step returns, the same on each replica.
      assigned: variables and the values that the step assigns to them.
      application: the application of gradients; None if there is none.
    """

    logs: dict[str, tf.Tensor]
    assigned: list[tuple[keras.Variable, tf.Tensor]]
    application: Application | None

    def assign(self) -> None:
        """Assigns the values."""
        for variable, value in self.assigned:
            variable.assign(value)


def partitioned(
    model: keras.Model, step: Callable[[Any], Any], own_rows: ReplicaRows, collectives: Collectives
) -> StepResult:
    """Emits a step for a replica's rows into the current graph.

    Args:
      model: compiled and built model.
      step: its `train_step` or `test_step`, or another function of a batch that returns values by name.
      own_rows: the replica's rows.
      collectives: collectives of all replicas.

    Raises:
      NotPartitionedError: the step cannot be partitioned.
    """
    metrics, weights = KerasMetrics(model).variables if model.compiled else [], model.trainable_variables
    state = variables_of_state(metrics, model.non_trainable_variables)
    variables = [*state, *weights]
    applications: list[tuple[Application, int]] = []
    trace = traced(
        lambda batch, _: _called(model, step, batch, applications),
        tf.nest.map_structure(lambda leaf: None if leaf is None else tf.type_spec_from_value(leaf), own_rows.batch),
        variables,
        state,
    )
    _check_order(trace.graph, applications)
    assigned = trace.assigned(variables)
    trained = {id(variable) for variable in weights}
    if trace.assigns_others or any(id(variable) in trained for variable, _ in assigned):
        raise NotPartitionedError("it assigns variables that are trained, or are not the model's")
    described_by_keras = {
        id(variable)
        for layer in keras_parts.normalizations(model)
        if not layer.synchronized
        for variable in layer.variables
    }
    of_rows = [pair for pair in assigned if id(pair[0]) in described_by_keras]
    others = [pair for pair in assigned if id(pair[0]) not in described_by_keras]
    gradients = list(applications[0][0].gradients) if applications else []
    logs = {key: tf.convert_to_tensor(value) for key, value in trace.results.items()}
    results = [*gradients, *logs.values(), *(value for _, value in others)]
    emitted = _emitted(trace, state, own_rows, results, collectives)
    whole = emitted.whole(results[len(gradients) :])
    assigned = [*zip([v for v, _ in others], whole[len(logs) :], strict=True)]
    for variable, own in zip([v for v, _ in of_rows], emitted.traced([value for _, value in of_rows]), strict=True):
        assigned.append((variable, tf.where(own_rows.rows > 0, own, tf.convert_to_tensor(variable))))
    application = applications[0][0]._replace(gradients=emitted.shares(gradients)) if applications else None
    return StepResult(dict(zip(logs, whole, strict=False)), assigned, application)


def communication(model: keras.Model, step: Callable[[Any], Any], spec: Any) -> str:
    """Returns what replicas communicate in a partitioned step, in words; empty if it cannot be partitioned.

    Args:
      model: built model.
      step: function of a batch that returns values by name.
      spec: structure of `tf.TensorSpec` of a batch.
    """
    try:
        return _in_words(_communicated(model, step, spec))
    except NotPartitionedError as error:
        _log.debug("A step of %s is not partitioned: %s", model.name, error)
        return ""


def otherwise(sent: str) -> str:
    """Returns what replicas do with a step that needs all rows, given the result of `communication`."""
    if sent:
        return f"replicas compute their own rows, and besides gradients communicate {sent} in each step"
    return "every replica gathers and computes the whole batch, with the result and the speed of one device"


def say_partitioned(model: keras.Model, name: str, reason: str, sent: str, strategy: HasCollectives, rows: str) -> None:
    """Says what replicas do with a step that needs all rows, and why.

    Args:
      model: built model.
      name: name of the step.
      reason: why it needs all rows.
      sent: result of `communication`.
      strategy: strategy on which it runs.
      rows: value of --rows.

    Raises:
      InputError: `rows` is "strict".
    """
    if not sent:
        return say_all_rows(model, name, reason, strategy, rows)
    text = f"{name} of {model.name} needs all rows of a batch: {reason.rstrip('.')}."
    check_not_strict(rows, f"{text} Make the value a mean or a sum over rows.")
    if strategy.is_chief:
        _log.info("%s Besides gradients, replicas communicate %s in each step.", text, sent)
    return None


def _in_words(calls: Sequence[RecordedCall]) -> str:
    sums = sum(len(call.shapes) for call in calls if call.operation == "all_reduce")
    rows = sum(len(call.shapes) for call in calls if call.operation == "all_gather")
    size = sum(call.payload_bytes for call in calls if call.operation == "all_reduce")
    parts = [f"{sums} sums or extremes ({byte_size(size)})"] if sums else []
    return " and ".join([*parts, *([f"the rows of {count_of(rows, 'tensor')}"] if rows else [])]) or "nothing else"


def _communicated(model: keras.Model, step: Callable[[Any], Any], spec: Any) -> list[RecordedCall]:
    """Returns the collective calls of a partitioned step, besides those that sum its gradients."""
    recorded = Recording(OneReplica())
    with keras_internals.symbolic_graph("partitioned"):
        batch = tf.nest.map_structure(_placeholder, spec)
        rows = count_rows(batch)
        try:
            partitioned(model, step, ReplicaRows(batch, (rows,), rows), recorded)
        except FAILURES as error:
            raise NotPartitionedError(described(error)) from None
    return recorded.calls


def _placeholder(spec: Any) -> Any:
    if spec is None:
        return None
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        raise NotPartitionedError("its batches have ragged or sparse tensors")
    return tf.compat.v1.placeholder(spec.dtype, [None, *spec.shape[1:]])


def _called(
    model: keras.Model, step: Callable[[Any], Any], batch: Any, applications: list[tuple[Application, int]]
) -> dict[str, Any]:
    def apply(
        original: Any, optimizer: keras.Optimizer, given: Sequence[Any], variables: Sequence[keras.Variable]
    ) -> None:
        pairs = [(tf.convert_to_tensor(g), v) for g, v in zip(given, variables, strict=True) if g is not None]
        gradients, updated = [g for g, _ in pairs], [v for _, v in pairs]
        number = len(tf.compat.v1.get_default_graph().get_operations())
        applications.append((Application(original, optimizer, gradients, updated), number))

    rows = count_rows(batch)
    replica = Replica(OneReplica(), rows, rows, apply, has_all_rows=True)
    with using(OneReplica()), running(replica), keras_internals.functions_inlined():
        with keras_parts.declared(model, synchronized=False):
            return flat(step(batch) or {})


def _check_order(graph: Any, applications: Sequence[tuple[Application, int]]) -> None:
    """Refuses a step that reads variables after it has updated them, which a trace does not."""
    if len(applications) > 1:
        raise NotPartitionedError("it applies gradients more than once")
    for _, number in applications:
        for operation in graph.get_operations()[number:]:
            if any(tensor.dtype == tf.resource for tensor in operation.inputs):
                raise NotPartitionedError("it reads variables after it has applied gradients")


def _emitted(
    trace: Trace,
    state: Sequence[keras.Variable],
    own_rows: ReplicaRows,
    results: Sequence[tf.Tensor],
    collectives: Collectives,
) -> Partitioned:
    tensors = {trace.size.ref(): own_rows.batch_size}
    rows = zip(tf.nest.flatten(trace.rows), tf.nest.flatten(own_rows.batch), strict=True)
    tensors |= {placeholder.ref(): leaf for placeholder, leaf in rows if leaf is not None}
    tensors |= {trace.unchanged[id(variable)].ref(): tf.convert_to_tensor(variable) for variable in state}
    tensors |= {inside.ref(): outside for outside, inside in trace.graph.captures}
    fed = {reference: (trace.inputs[reference], tensor) for reference, tensor in tensors.items()}
    counts = count_rows(own_rows.batch), own_rows.rows, own_rows.batch_size
    return Partitioned(trace.graph, fed, results, counts, counting(collectives, own_rows.rows))
