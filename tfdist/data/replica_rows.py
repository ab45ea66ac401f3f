"""One replica's rows of a global batch, which may have fewer rows than there are replicas."""

from typing import Any, NamedTuple

import tensorflow as tf


class ReplicaRows(NamedTuple):
    """What one replica computes of a global batch: at least one row, as code of users and of Keras expects.

    A replica without a row of its own computes the last row of the batch, which any model accepts that accepts the batch.
    It takes part in each call of the step, but nothing that it computes counts: neither losses, gradients, metrics and
    statistics, nor what is communicated (`CountedRows`), nor outputs.

    Attributes:
      batch: structure of tensors, whose first dim is at least 1.
      counts: scalars int32, for each tensor of the batch, or one for all: the number of rows that count, 0 if the replica has
        no row of its own.
      batch_size: scalar int32; rows of the global batch.
    """

    batch: Any
    counts: tuple[tf.Tensor, ...]
    batch_size: tf.Tensor

    @property
    def rows(self) -> tf.Tensor:
        """The number of rows that count, those of the first tensor."""
        return self.counts[0]

    @property
    def own(self) -> Any:
        """The rows that count, of which there may be none, given a count for each tensor."""
        counts = iter(self.counts)
        return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[: next(counts)], self.batch)
