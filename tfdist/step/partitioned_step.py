"""Partitions a single-device step over all rows of a batch, for code that combines values of several rows.

The step is traced for one device and emitted for each replica, with communication of the sums and rows of other replicas
that its operations need; see `tfdist.row_semantics.partitioning`. Other steps are computed by each replica.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives, OneReplica, RecordingCollectives, collectives_scope
from tfdist.collectives.rows import gather_structure, mask_if_empty
from tfdist.data.batches import count_rows, has_static_rows
from tfdist.data.row_partition import ReplicaRows
from tfdist.errors import error_summary
from tfdist.gradients import unscale
from tfdist.row_semantics import keras_parts
from tfdist.row_semantics.explanation import Communication, record_static_row_reads
from tfdist.row_semantics.partitioning import NotPartitionedError, PartitionedProgram
from tfdist.row_semantics.tracing import FAILURES, Trace, distinct_variables, trace_function

_log = logging.getLogger(__name__)

# The rows that a replica computes: its own; its own, with the values of other rows that operations need; or the whole batch.
Division = Literal["own", "partitioned", "whole"]
# (batch) -> gradients, and values by name; computes them from all rows, on one device
OneDeviceStep = Callable[[Any], tuple[Sequence[tf.Tensor | tf.IndexedSlices], Mapping[str, Any]]]


class StepResult(NamedTuple):
    """The result of a partitioned step on each replica."""

    # This replica's shares, whose sums over replicas are the gradients of the batch
    gradients: list[tf.Tensor | tf.IndexedSlices]
    totals: list[tf.Tensor] | None  # the gradients of the batch if each replica computed them from sums, else None
    values: dict[str, tf.Tensor]  # the values that the step returns, equal on every replica
    assigned: list[tuple[keras.Variable, tf.Tensor]]  # variables and the values that the step assigns to them

    def assign(self) -> None:
        """Assigns the values of `assigned`."""
        for variable, value in self.assigned:
            variable.assign(value)


def all_rows_step(
    division: Division,
    model: keras.Model,
    metrics: Sequence[keras.Variable],
    step: OneDeviceStep,
    own_rows: ReplicaRows,
    collectives: Collectives,
    static_rows: int | None = None,
) -> StepResult:
    """Computes a step over the rows of all replicas, partitioned or on each replica; see `partition_step`."""
    if division == "partitioned":
        return partition_step(model, metrics, step, own_rows, collectives)
    with collectives_scope(OneReplica()):
        gradients, values = step(gather_batch(own_rows, collectives, static_rows))
    return StepResult([unscale(gradient, collectives.size) for gradient in gradients], None, dict(values), [])


def gather_batch(own_rows: ReplicaRows, collectives: Collectives, static_rows: int | None) -> Any:
    """Returns the rows of all replicas, `static_rows` if this number is known. A replica function.

    Cost: one all-gather of the batch.
    """
    batch = gather_structure(own_rows.counted_rows, collectives)
    if static_rows is None:
        return batch
    return tf.nest.map_structure(
        lambda x: tf.ensure_shape(x, [static_rows, *x.shape[1:]]) if isinstance(x, tf.Tensor) else x, batch
    )


def partition_step(
    model: keras.Model,
    metrics: Sequence[keras.Variable],
    step: OneDeviceStep,
    own_rows: ReplicaRows,
    collectives: Collectives,
) -> StepResult:
    """Emits a step for a replica's rows into the current graph; `metrics` are the variables of the model's metrics.

    Raises `NotPartitionedError` if the step cannot be partitioned.
    """
    weights = model.trainable_variables
    state = distinct_variables(metrics, model.non_trainable_variables)
    variables = [*state, *weights]

    def one_device_step(batch: Any, _: tf.Tensor) -> tuple[list[tf.Tensor | tf.IndexedSlices], dict[str, tf.Tensor]]:
        with collectives_scope(OneReplica()), keras_internals.inline_functions():
            with keras_parts.declare_row_wise(model, synchronized=False):
                gradients, values = step(batch)
        return list(gradients), {key: tf.convert_to_tensor(value) for key, value in values.items()}

    spec = tf.nest.map_structure(lambda leaf: leaf if leaf is None else tf.type_spec_from_value(leaf), own_rows.batch)
    trace = trace_function(one_device_step, spec, variables, state)
    assignments = trace.assignments(variables)
    weight_ids = {id(variable) for variable in weights}
    if trace.assigns_others or any(id(variable) in weight_ids for variable, _ in assignments):
        raise NotPartitionedError("it assigns variables that are trained or do not belong to the model")
    local_layers = [layer for layer in keras_parts.normalizations(model) if not layer.synchronized]
    normalization = {id(variable) for layer in local_layers for variable in layer.variables}
    local_pairs = [pair for pair in assignments if id(pair[0]) in normalization]
    shared_pairs = [pair for pair in assignments if id(pair[0]) not in normalization]
    gradients, values = trace.results
    shared_results = [*values.values(), *(value for _, value in shared_pairs)]
    parts = [(g.values, g.indices) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    partition = _emit(trace, state, own_rows, [*tf.nest.flatten(parts), *shared_results], collectives)
    shared_values = partition.full_results(shared_results)
    assignments = [*zip([v for v, _ in shared_pairs], shared_values[len(values) :], strict=True)]
    local_values = partition.traced_values([value for _, value in local_pairs])
    for (variable, _), local_value in zip(local_pairs, local_values, strict=True):
        assignments.append((variable, tf.where(own_rows.rows > 0, local_value, tf.convert_to_tensor(variable))))
    totals = partition.full_results(gradients) if partition.are_full(gradients) else None
    return StepResult(partition.shares(gradients), totals, dict(zip(values, shared_values, strict=False)), assignments)


def communication(
    model: keras.Model, metrics: Sequence[keras.Variable], step: OneDeviceStep, spec: Any
) -> Communication:
    """Returns the communication of a partitioned step in addition to gradient sums.

    `metrics` are the variables of the model's metrics, and `spec` is a structure of `tf.TensorSpec` of a batch.
    """
    recording = RecordingCollectives(OneReplica())
    with keras_internals.symbolic_graph("partitioned"):
        try:
            batch = tf.nest.map_structure(_placeholder, spec)
            rows = count_rows(batch)
            with record_static_row_reads() as static_reads:
                partition_step(model, metrics, step, ReplicaRows(batch, (rows,), rows), recording)
        except NotPartitionedError as error:
            return Communication(obstacle=str(error))
        except FAILURES as error:
            _log.debug("A step of %s is not partitioned: %s", model.name, error_summary(error))
            return Communication(obstacle="it cannot be traced for any number of rows")
    if static_reads and has_static_rows(spec):
        return Communication(obstacle="its computation may depend on the static number of rows")
    return Communication(recording.calls)


def _placeholder(spec: Any) -> Any:
    if spec is None:
        return None
    if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank:
        raise NotPartitionedError("its batches have ragged or sparse tensors")
    return tf.compat.v1.placeholder(spec.dtype, [None, *spec.shape[1:]])


def _emit(
    trace: Trace,
    state: Sequence[keras.Variable],
    own_rows: ReplicaRows,
    results: Sequence[tf.Tensor],
    collectives: Collectives,
) -> PartitionedProgram:
    tensors = {trace.size.ref(): own_rows.batch_size}
    rows = zip(tf.nest.flatten(trace.rows), tf.nest.flatten(own_rows.batch), strict=True)
    tensors |= {placeholder.ref(): leaf for placeholder, leaf in rows if leaf is not None}
    tensors |= {trace.initial_values[id(variable)].ref(): tf.convert_to_tensor(variable) for variable in state}
    tensors |= {inside.ref(): outside for outside, inside in trace.graph.captures}
    feeds = {reference: (trace.inputs[reference], tensor) for reference, tensor in tensors.items()}
    counts = count_rows(own_rows.batch), own_rows.rows, own_rows.batch_size
    return PartitionedProgram(trace.graph, feeds, results, counts, mask_if_empty(collectives, own_rows.rows))
