"""A step as one device computes it, partitioned by rows: for code that compares or divides what replicas have in part.

The step is traced as for one device, and emitted again for each replica, with the sums and rows of other replicas that its
operations need; see `tfdist.row_semantics.partitioning`.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives, OneReplica, Recording, using
from tfdist.collectives.rows import counting
from tfdist.data.batches import count_rows, has_static_rows
from tfdist.data.row_partition import ReplicaRows
from tfdist.errors.engine_errors import described
from tfdist.row_semantics import keras_parts
from tfdist.row_semantics.explanation import Communication, noting_static_rows
from tfdist.row_semantics.partitioning import NotPartitionedError, Partitioned
from tfdist.row_semantics.tracing import FAILURES, Trace, traced, variables_of_state

_log = logging.getLogger(__name__)

# (batch) -> gradients, and values by name, as one device computes them from all rows
OneDeviceStep = Callable[[Any], tuple[Sequence[tf.Tensor], Mapping[str, Any]]]


class StepResult(NamedTuple):
    """What a step computes on each replica.

    Attributes:
      gradients: a replica's shares: their sums over replicas are the gradients of the batch.
      totals: the gradients of the batch, if each replica has computed them from sums; else None.
      values: the values that the step returns, the same on each replica.
      assigned: variables and the values that the step assigns to them.
    """

    gradients: list[tf.Tensor]
    totals: list[tf.Tensor] | None
    values: dict[str, tf.Tensor]
    assigned: list[tuple[keras.Variable, tf.Tensor]]

    def assign(self) -> None:
        """Assigns the values."""
        for variable, value in self.assigned:
            variable.assign(value)


def partitioned(
    model: keras.Model,
    metrics: Sequence[keras.Variable],
    step: OneDeviceStep,
    own_rows: ReplicaRows,
    collectives: Collectives,
) -> StepResult:
    """Emits a step for a replica's rows into the current graph.

    Args:
      model: built model.
      metrics: variables of its metrics.
      step: the step.
      own_rows: the replica's rows.
      collectives: collectives of all replicas.

    Raises:
      NotPartitionedError: the step cannot be partitioned.
    """
    weights = model.trainable_variables
    state = variables_of_state(metrics, model.non_trainable_variables)
    variables = [*state, *weights]

    def one_device_step(batch: Any, _: tf.Tensor) -> tuple[list[tf.Tensor], dict[str, tf.Tensor]]:
        with using(OneReplica()), keras_internals.functions_inlined():
            with keras_parts.declared(model, synchronized=False):
                gradients, values = step(batch)
        return list(gradients), {key: tf.convert_to_tensor(value) for key, value in values.items()}

    trace = traced(
        one_device_step,
        tf.nest.map_structure(lambda leaf: None if leaf is None else tf.type_spec_from_value(leaf), own_rows.batch),
        variables,
        state,
    )
    assigned = trace.assigned(variables)
    trained = {id(variable) for variable in weights}
    if trace.assigns_others or any(id(variable) in trained for variable, _ in assigned):
        raise NotPartitionedError("it assigns variables that are trained, or are not the model's")
    normalization = {
        id(variable)
        for layer in keras_parts.normalizations(model)
        if not layer.synchronized
        for variable in layer.variables
    }
    own_pairs = [pair for pair in assigned if id(pair[0]) in normalization]
    whole_pairs = [pair for pair in assigned if id(pair[0]) not in normalization]
    gradients, values = trace.results
    results = [*gradients, *values.values(), *(value for _, value in whole_pairs)]
    emitted = _emitted(trace, state, own_rows, results, collectives)
    whole = emitted.whole(results[len(gradients) :])
    assigned = [*zip([v for v, _ in whole_pairs], whole[len(values) :], strict=True)]
    for variable, own in zip([v for v, _ in own_pairs], emitted.traced([value for _, value in own_pairs]), strict=True):
        assigned.append((variable, tf.where(own_rows.rows > 0, own, tf.convert_to_tensor(variable))))
    totals = emitted.whole(gradients) if emitted.are_whole(gradients) else None
    return StepResult(emitted.shares(gradients), totals, dict(zip(values, whole, strict=False)), assigned)


def communication(
    model: keras.Model, metrics: Sequence[keras.Variable], step: OneDeviceStep, spec: Any
) -> Communication:
    """Returns what replicas communicate in a partitioned step, besides the sums of its gradients.

    Args:
      model: built model.
      metrics: variables of its metrics.
      step: the step.
      spec: structure of `tf.TensorSpec` of a batch.
    """
    recorded = Recording(OneReplica())
    with keras_internals.symbolic_graph("partitioned"):
        try:
            batch = tf.nest.map_structure(_placeholder, spec)
            rows = count_rows(batch)
            with noting_static_rows() as read:
                partitioned(model, metrics, step, ReplicaRows(batch, (rows,), rows), recorded)
        except NotPartitionedError as error:
            return Communication(refused=str(error))
        except FAILURES as error:
            _log.debug("A step of %s is not partitioned: %s", model.name, described(error))
            return Communication(refused="it cannot be traced for any number of rows")
    if read and has_static_rows(spec):
        return Communication(refused="it may do something else for this number of rows than for others")
    return Communication(recorded.calls)


def _placeholder(spec: Any) -> Any:
    if spec is None:
        return None
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        raise NotPartitionedError("its batches have ragged or sparse tensors")
    return tf.compat.v1.placeholder(spec.dtype, [None, *spec.shape[1:]])


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
