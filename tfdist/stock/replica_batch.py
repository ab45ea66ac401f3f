"""What one replica's code is given of a global batch: its own rows or, for code that needs all rows, all of them."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.collectives import Collectives, OneReplica
from tfdist.data.batches import Dealt, count_rows, with_any_rows
from tfdist.loss import floating
from tfdist.stock.gathering import gathered
from tfdist.stock.logs import Law
from tfdist.stock.one_device import Apply, Replica
from tfdist.strategy import HasCollectives

_log = logging.getLogger(__name__)


class ReplicaBatch(NamedTuple):
    """One replica's part of the work on a global batch.

    Attributes:
      batch: structure of tensors, the rows first.
      rows: scalar int32; rows in `batch`.
      batch_size: scalar int32; rows of the global batch.
      weights: the factor of this replica's values in the sum over replicas, scalar float, by what the values are.
      counts: scalar bool; whether what the code adds to metrics counts.
      collectives: what the code communicates through.
      number: of the replica whose random numbers it draws.
      has_all_rows: whether the rows are those of the global batch.
    """

    batch: Any
    rows: tf.Tensor
    batch_size: tf.Tensor
    weights: Mapping[Law, tf.Tensor]
    counts: tf.Tensor
    collectives: Collectives
    number: tf.Tensor | int
    has_all_rows: bool

    def replica(self, apply: Apply | None = None) -> Replica:
        """The replica for whose code this is; see `Replica` for `apply`."""
        return Replica(self.collectives, self.rows, self.batch_size, apply, self.has_all_rows)


def own_rows(dealt: Dealt, collectives: Collectives) -> ReplicaBatch:
    """The rows that were dealt to this replica, of which there may be none; inside a replica function."""
    batch, batch_size = with_any_rows(dealt)
    rows = count_rows(batch)
    weights: dict[Law, tf.Tensor] = {"mean": floating(rows) / floating(batch_size), "sum": floating(rows > 0)}
    return ReplicaBatch(batch, rows, batch_size, weights, rows > 0, collectives, collectives.rank, False)


def all_rows(dealt: Dealt, collectives: Collectives) -> ReplicaBatch:
    """The rows of all replicas, on each of them: all compute the same, and the first one's metrics count.

    Cost: one all-gather of the batch. Averaging what all have computed keeps the replicas equal also where a device adds up
    in another order each time.
    """
    batch = gathered(with_any_rows(dealt).batch, collectives)
    rows = count_rows(batch)
    share = floating(tf.constant(1 / collectives.size, tf.float64))
    weights: dict[Law, tf.Tensor] = {"mean": share, "sum": share}
    return ReplicaBatch(batch, rows, rows, weights, tf.equal(collectives.rank, 0), OneReplica(), 0, True)


def fewer_rows(dealt: Dealt, size: int) -> Any:
    """The first of a replica's rows, so few that those of all replicas together are no more than one replica has."""
    batch = with_any_rows(dealt).batch
    count = tf.maximum(count_rows(batch) // size, 1)
    return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[:count], batch)


def warn_of_all_rows(model: keras.Model, name: str, found: str, strategy: HasCollectives) -> None:
    """Says that replicas do not share the work of a method, and why."""
    if strategy.is_chief:
        _log.warning(
            "%s of %s needs all rows of a batch: from a part of them %s. Every replica therefore computes the whole batch, "
            "with the result and in the time of one device. To share the work, make the value a mean or a sum over rows, or "
            "gather the rows that are compared with tfdist.gather_rows.",
            name,
            model.name,
            found.rstrip("."),
        )
