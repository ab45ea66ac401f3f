"""The rows of a global batch for one replica's code: its own rows or, if the code needs all rows, all of them."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.collectives import Collectives, OneReplica
from tfdist.collectives.counted_rows import counting
from tfdist.collectives.gathering import gathered
from tfdist.data.batches import count_rows
from tfdist.data.replica_rows import ReplicaRows
from tfdist.distribution.strategy import Strategy
from tfdist.errors import InputError
from tfdist.keras_fit.one_device import Apply, Replica
from tfdist.keras_fit.step_outputs import ReduceOp
from tfdist.step.loss import floating

_log = logging.getLogger(__name__)


class ReplicaBatch(NamedTuple):
    """One replica's part of the work on a global batch.

    Attributes:
      batch: structure of tensors, whose first dim is at least 1.
      rows: scalar int32; rows in `batch` that count; see `ReplicaRows`.
      batch_size: scalar int32; rows of the global batch.
      weights: scalar factor of this replica's values in the sum over replicas, by how they are combined.
      collectives: collectives for the code.
      number: index of the replica whose random numbers it draws.
      has_all_rows: whether the rows are those of the global batch.
    """

    batch: Any
    rows: tf.Tensor
    batch_size: tf.Tensor
    weights: Mapping[ReduceOp, tf.Tensor]
    collectives: Collectives
    number: tf.Tensor | int
    has_all_rows: bool

    def replica(self, apply: Apply | None = None) -> Replica:
        """Returns the replica for this batch; see `Replica` for `apply`."""
        return Replica(self.collectives, self.rows, self.batch_size, apply, self.has_all_rows)


def rows_of(
    own_rows: ReplicaRows, collectives: Collectives, needs_all_rows: bool, static_rows: int | None
) -> ReplicaBatch:
    """Returns `all_rows` if the replica's code needs them, otherwise `replica_rows`."""
    return all_rows(own_rows, collectives, static_rows) if needs_all_rows else replica_rows(own_rows, collectives)


def replica_rows(own_rows: ReplicaRows, collectives: Collectives) -> ReplicaBatch:
    """Returns the rows that this replica computes; inside a replica function.

    Args:
      own_rows: this replica's rows.
      collectives: collectives of all replicas.
    """
    rows, batch_size = own_rows.rows, own_rows.batch_size
    weights: dict[ReduceOp, tf.Tensor] = {"mean": floating(rows) / floating(batch_size), "sum": floating(rows > 0)}
    counted = counting(collectives, rows)
    return ReplicaBatch(own_rows.batch, rows, batch_size, weights, counted, collectives.rank, False)


def all_rows(own_rows: ReplicaRows, collectives: Collectives, static_rows: int | None) -> ReplicaBatch:
    """Returns the rows of all replicas, on each of them: all compute the same.

    Cost: one all-gather of the batch. Gradients are averaged, which keeps the replicas equal even if the order of
    summation on a device varies. Inside a replica function.

    Args:
      own_rows: this replica's rows.
      collectives: collectives of all replicas.
      static_rows: number of rows of each tensor, which code may read from static shapes; None if it is unknown.
    """
    batch = gathered(own_rows.own, collectives)
    if static_rows is not None:
        batch = tf.nest.map_structure(
            lambda x: tf.ensure_shape(x, [static_rows, *x.shape[1:]]) if isinstance(x, tf.Tensor) else x, batch
        )
    rows = count_rows(batch)
    return ReplicaBatch(batch, rows, rows, of_equal_values(collectives), OneReplica(), 0, True)


def of_equal_values(collectives: Collectives) -> dict[ReduceOp, tf.Tensor]:
    """Returns the weights of values that are the same on all replicas; see `ReplicaBatch`."""
    part = floating(tf.constant(1 / collectives.size, tf.float64))
    return {"mean": part, "sum": part}


def check_not_strict(rows: str, received: str) -> None:
    """Refuses code that needs rows of other replicas, if `rows` is "strict"."""
    if rows == "strict":
        raise InputError(
            f"With --rows=strict, replicas need nothing of each other's rows but means and sums. Received: {received}"
        )


def say_all_rows(model: keras.Model, name: str, reason: str, follows: str, strategy: Strategy, rows: str) -> None:
    """Warns that replicas do not share the work of a method, why, and what each does instead.

    Raises:
      InputError: `rows` is "strict".
    """
    text = f"{name} of {model.name} needs all rows of a batch: {reason.rstrip('.')}."
    remedy = (
        "make it a mean or a sum over rows or a value for each row, or gather the rows that are compared with "
        "tfdist.gather_rows; tfdist explain shows all values of the step."
    )
    check_not_strict(rows, f"{text} To do so, {remedy}")
    if strategy.is_chief:
        _log.warning("%s Every replica therefore %s. To split the work, %s", text, follows, remedy)
