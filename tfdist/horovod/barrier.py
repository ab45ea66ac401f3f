"""Barriers, and functions that return ranks and sizes as tensors."""

from typing import Any

import tensorflow as tf

from tfdist.horovod.data_movement import reduce_through_engine
from tfdist.horovod.engine import call_of
from tfdist.horovod.ops import Sum
from tfdist.horovod.process import engine
from tfdist.horovod.process_sets import global_process_set


def barrier(process_set: Any = global_process_set) -> tf.Tensor:
    """Returns a zero that is available once every rank has made the call; in a graph, it must be used."""
    [total] = reduce_through_engine([tf.zeros([1])], Sum, call_of("barrier", None, process_set))
    return total[0]


def join() -> tf.Tensor:
    """Signals that this rank is out of data, waits for the other ranks, and returns the last rank that joined.

    The other ranks' all-reduces continue without this rank. Gathers do not, nor do operations that use them: sparse
    gradients, compression and reduce-scatter.
    """
    return engine().join()


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks in a process set, as a scalar int32."""
    return engine().size_of(process_set_id)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns whether this rank is in a process set: a scalar int32, 1 or 0, or Horovod's negative error code."""
    return engine().is_included(process_set_id)


def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns this rank, as a scalar int32."""
    return engine().rank_of("rank")


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks on this host, as a scalar int32."""
    return engine().rank_of("local_size")


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns this rank's index among the ranks on its host, as a scalar int32."""
    return engine().rank_of("local_rank")
