"""Reduction of sparse gradients, which consist of a few rows of a variable, such as those of embeddings."""

import logging
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.collectives.tensor_bytes import tensor_bytes
from tfdist.distribution.strategy import State
from tfdist.gradients.reducer import Reduced, Reducer, specs_of, split_at

SPARSE_MIN_BYTES = 256 * 1024  # smaller tensors are summed faster in a dense bucket

_log = logging.getLogger(__name__)


class SparseRows(Reducer):
    """Sums `tf.IndexedSlices` as rows where that sends less than an exact dense sum; other tensors by another reducer.

    Rows with the same index are summed first; then indices and rows are gathered, their number differing between
    replicas, and summed in the order of ranks, exactly. Cost: r rows of b bytes are r (b + 4) + 4 bytes, received from
    N - 1 replicas; a dense sum of V rows sends 2 V b (N - 1) / N. Shapes being static, r is assumed to be the number of
    indices, or V if there are more.

    Which tensors are sparse is known only when a step is traced, after the state has been requested. So the inner
    reducer has a separate call, and state, for each tensor: the choice for one tensor does not affect the state of
    others, and its own state stays unused while it is sent as rows. It should therefore wrap only the reducer of
    variables that may be sparse (`PartitionedReducer` puts them in a partition of their own), and not be inside error feedback,
    which adds dense tensors.
    """

    keeps_shapes = True

    def __init__(self, inner: Reducer, names: Sequence[str] = ()):
        """Wraps a reducer.

        Args:
          inner: reducer that sums lists of one dense tensor.
          names: names of the tensors in the log, in their order.
        """
        self._inner = inner
        self._names = names
        self._said: set[int] = set()
        self.biased = inner.biased

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """See base class: the inner reducer's state for each tensor separately."""
        return [state for spec in specs for state in self._inner.state([spec])]

    def reduce(
        self,
        tensors: Sequence[tf.Tensor | tf.IndexedSlices],
        state: Sequence[tf.Tensor],
        collectives: Collectives,
        *,
        name: str,
    ) -> Reduced:
        """See base class; a tensor may be a `tf.IndexedSlices` of static dense shape. `totals` and `sent` are dense."""
        whole = Reduced([], [], [], [])
        left = list(state)
        for i, (tensor, spec) in enumerate(zip(tensors, specs_of(tensors), strict=True)):
            mine, left = split_at(left, len(self._inner.state([spec])))
            if isinstance(tensor, tf.IndexedSlices) and self._goes_as_rows(tensor, collectives, i):
                total, sent = sum_rows(tensor, collectives, f"{name}/{i}")
                part = Reduced([total], [sent], mine, [total])
            else:
                given = tf.reshape(tf.convert_to_tensor(tensor), spec.shape)
                part = self._inner.reduce([given], mine, collectives, name=f"{name}/{i}")
            for values, more in zip(whole, part, strict=True):
                values += more
        return whole

    def _goes_as_rows(self, slices: tf.IndexedSlices, collectives: Collectives, place: int) -> bool:
        """Returns whether to send rows; logs the choice once per tensor."""
        if not slices.shape.num_elements() or slices.values.shape[0] is None:
            return False
        fewer = rows_send_less(slices, collectives)
        if place not in self._said:
            self._said.add(place)
            name = self._names[place] if self._names else f"tensor {place}"
            way = "as rows" if fewer else "dense"
            _log.info(
                "The gradient of %s is sent %s: its rows are %d bytes, the dense tensor is %d.",
                name,
                way,
                *_bytes(slices),
            )
        return fewer


def rows_send_less(slices: tf.IndexedSlices, collectives: Collectives) -> bool:
    """Returns whether gathering rows sends less than an exact dense sum; see `SparseRows` for the cost.

    Args:
      slices: slices of static dense shape; if the number of rows is unknown during tracing, dense is assumed to be
        less.
      collectives: collectives of the replica.
    """
    if not slices.shape.num_elements() or slices.values.shape[0] is None:
        return False
    sparse, dense = _bytes(slices)
    return slices.dtype in collectives.wire.gathers and sparse * collectives.size < 2 * dense


def _bytes(slices: tf.IndexedSlices) -> tuple[int, int]:
    """Returns the bytes of the rows with their indices and count, and of the dense tensor."""
    dense = tensor_bytes(slices)
    rows = min(slices.values.shape[0], slices.shape[0])
    return rows * (dense // slices.shape[0] + 4) + 4, dense


def sum_rows(slices: tf.IndexedSlices, collectives: Collectives, name: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the dense sum over replicas of slices of static dense shape, and this replica's contribution."""
    places, positions = tf.unique(tf.cast(slices.indices, tf.int32))
    count = tf.size(places)
    rows = tf.math.unsorted_segment_sum(slices.values, positions, count)
    # Each replica's count precedes its indices, so that no other message is needed to split the gathered rows.
    all_places, all_rows = collectives.all_gather([tf.concat([count[None], places], 0), rows], name=name)
    total, start = tf.zeros(slices.shape, slices.dtype), 0
    for rank in range(collectives.size):
        end = start + all_places[start + rank]
        mine = all_places[start + rank + 1 : end + rank + 1]
        total = tf.tensor_scatter_nd_add(total, mine[:, None], all_rows[start:end])
        start = end
    return total, tf.tensor_scatter_nd_add(tf.zeros(slices.shape, slices.dtype), places[:, None], rows)
