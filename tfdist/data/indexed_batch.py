"""A batch that says which examples are in it."""

from typing import Any, NamedTuple

import tensorflow as tf


class IndexedBatch(NamedTuple):
    """What a pipeline hands to replicas of a run that keeps a ledger.

    Attributes:
      batch: the batched examples, (x, y) or (x, y, sample_weight).
      numbers: int64 [rows], the place of each example in the natural order of its data set, from 0.
    """

    batch: Any
    numbers: tf.Tensor
