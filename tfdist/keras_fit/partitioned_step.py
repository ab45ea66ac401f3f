"""Builds steps that need all rows of a batch: each replica computes the whole batch, or the step is partitioned by rows."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import keras_internals
from tfdist.collectives import Collectives, OneReplica
from tfdist.collectives.rows import mask_if_empty
from tfdist.data.batches import count_rows
from tfdist.data.row_partition import ReplicaRows
from tfdist.keras_fit.one_device import Replica, replica_context
from tfdist.keras_fit.step_outputs import ReduceOp, flatten_logs
from tfdist.row_semantics.explanation import Communication
from tfdist.row_semantics.partitioning import NotPartitionedError
from tfdist.step import partitioned_step
from tfdist.step.loss import to_floatx
from tfdist.step.metrics import KerasMetrics
from tfdist.step.partitioned_step import StepResult

_log = logging.getLogger(__name__)


def batch_for_replica(
    own_rows: ReplicaRows, collectives: Collectives, needs_all_rows: bool, static_rows: int | None
) -> tuple[Any, Mapping[ReduceOp, tf.Tensor], tf.Tensor | int, Replica]:
    """Returns the batch that a replica computes: its own rows, or all rows; inside a replica function.

    Also returns, by reduce op, the scalar weight of this replica's values in the sum over replicas; the replica index for
    random numbers; and the `Replica` for the code, without an `apply`.
    """
    if needs_all_rows and collectives.size > 1:
        batch = partitioned_step.gather_batch(own_rows, collectives, static_rows)
        rows = count_rows(batch)
        # Gradients are averaged, so replicas remain equal even if the order of summation on a device varies.
        replica = Replica(OneReplica(), rows, rows, has_all_rows=True)
        return batch, equal_value_weights(collectives), 0, replica
    rows, batch_size = own_rows.rows, own_rows.batch_size
    weights: dict[ReduceOp, tf.Tensor] = {"mean": to_floatx(rows) / to_floatx(batch_size), "sum": to_floatx(rows > 0)}
    replica = Replica(mask_if_empty(collectives, rows), rows, batch_size)
    return own_rows.batch, weights, collectives.rank, replica


def equal_value_weights(collectives: Collectives) -> dict[ReduceOp, tf.Tensor]:
    """Returns the weights of values that are equal on all replicas; see `batch_for_replica`."""
    weight = to_floatx(tf.constant(1 / collectives.size, tf.float64))
    return {"mean": weight, "sum": weight}


class ApplyCall(NamedTuple):
    """The call of an optimizer's `apply` in a step."""

    optimizer: keras.Optimizer
    gradients: Sequence[tf.Tensor | tf.IndexedSlices]
    variables: Sequence[keras.Variable]
    operations: int = 0  # number of operations traced before the call, if known


def run_partitioned(
    model: keras.Model,
    step: Callable[[Any], Any],
    own_rows: ReplicaRows,
    collectives: Collectives,
    sparse: Collection[str] = (),
) -> tuple[StepResult, ApplyCall | None]:
    """Adds a partitioned step of a compiled and built model, for a replica's rows, to the current graph.

    `step` returns values by name. Gradients of variables whose paths are in `sparse` may be `tf.IndexedSlices`. Returns the
    result of the step, and the application of its gradients; None if it applies none. Raises `NotPartitionedError` if the step
    cannot be partitioned.
    """
    applications: list[ApplyCall] = []
    one_device_step = _one_device_step(step, applications, sparse)
    result = partitioned_step.partition_step(model, _metrics(model), one_device_step, own_rows, collectives)
    return result, applications[0]._replace(gradients=result.gradients) if applications else None


def communication(model: keras.Model, step: Callable[[Any], Any], spec: Any) -> Communication:
    """Returns the communication, other than the sums of gradients, of a step that returns values by name.

    `spec` is a structure of `tf.TensorSpec` of a batch.
    """
    return partitioned_step.communication(model, _metrics(model), _one_device_step(step, []), spec)


def _metrics(model: keras.Model) -> list[keras.Variable]:
    return KerasMetrics(model).variables if model.compiled else []


def _one_device_step(
    step: Callable[[Any], Any], applications: list[ApplyCall], sparse: Collection[str] = ()
) -> partitioned_step.OneDeviceStep:
    """Returns a model's step for one device, which appends its applications of gradients to `applications`."""

    def apply(optimizer: keras.Optimizer, grads: Sequence[Any], variables: Sequence[keras.Variable]) -> None:
        pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
        gradients = [g if v.path in sparse else tf.convert_to_tensor(g) for g, v in pairs]
        operations = keras_internals.count_operations()
        applications.append(ApplyCall(optimizer, gradients, [v for _, v in pairs], operations))

    def one_device_step(batch: Any) -> tuple[Sequence[tf.Tensor], dict[str, Any]]:
        rows = count_rows(batch)
        with replica_context(Replica(OneReplica(), rows, rows, apply, has_all_rows=True)):
            values = flatten_logs(step(batch) or {})
        if not applications:
            return (), values
        if len(applications) > 1:
            raise NotPartitionedError("it applies gradients more than once")
        later_operations = tf.compat.v1.get_default_graph().get_operations()[applications[0].operations :]
        # In a trace, variables are not updated.
        if any(tensor.dtype == tf.resource for operation in later_operations for tensor in operation.inputs):
            raise NotPartitionedError("it reads variables after it has applied gradients")
        return applications[0].gradients, values

    return one_device_step
