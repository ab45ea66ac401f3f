"""A batch with the indices of its examples."""

from typing import Any, NamedTuple

import tensorflow as tf


class IndexedBatch(NamedTuple):
    """A batch as passed to the replicas of a run that keeps a ledger.

    Attributes:
      batch: the batched examples, (x, y) or (x, y, sample_weight).
      numbers: int64 [rows], index of each example in the natural order of its data set, from 0.
    """

    batch: Any
    numbers: tf.Tensor
