"""Sums of gradients that are a few rows of a variable, as an embedding's are."""

import logging
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.distribution.strategy import State
from tfdist.gradients.reducer import Reduced, Reducer, specs_of, split_at

SPARSE_MIN_BYTES = 256 * 1024  # a smaller tensor is sooner summed whole, beside others in a bucket, than as rows

_log = logging.getLogger(__name__)


class SparseRows(Reducer):
    """Sums `tf.IndexedSlices` as rows, where that sends less than an exact dense sum, and all others as another reducer does.

    Rows of the same index are added up first; then indices and rows are gathered, each replica's own number of them,
    and added up in the order of ranks, exactly. Cost: r rows of b bytes are r (b + 4) + 4 bytes, received from N - 1
    replicas; a dense sum of V rows sends 2 V b (N - 1) / N. As shapes are static, r is taken for the number of indices,
    or V if there are more than that.

    Which tensors are sparse is known only when a step is traced, later than state is asked for. So the inner reducer
    has a call, and state, for each tensor apart: whichever way one goes, no other's state changes, and its own waits
    unused while it goes as rows. For this reason it belongs around the reducer of those variables alone that may be
    sparse (`Routed` has them in a route of their own), and not inside error feedback, which adds dense tensors.
    """

    keeps_shapes = True

    def __init__(self, inner: Reducer, names: Sequence[str] = ()):
        """Args: inner: sums lists of one dense tensor; names: what the tensors are called in the log, in their order."""
        self._inner = inner
        self._names = names
        self._said: set[int] = set()
        self.biased = inner.biased

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """See base class: the inner reducer's for each tensor apart."""
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
        """Whether rows send less; says so once for each tensor."""
        if not slices.shape.num_elements() or slices.values.shape[0] is None:
            return False
        fewer = rows_send_less(slices, collectives)
        if place not in self._said:
            self._said.add(place)
            name = self._names[place] if self._names else f"tensor {place}"
            way = "as rows" if fewer else "dense"
            _log.info("The gradient of %s travels %s: rows are %d bytes, the whole is %d.", name, way, *_bytes(slices))
        return fewer


def rows_send_less(slices: tf.IndexedSlices, collectives: Collectives) -> bool:
    """Whether rows, gathered, send less than an exact sum of the whole tensor; see `SparseRows` for the cost.

    Args:
      slices: of static dense shape; of a number of rows that is not known when tracing, the whole is taken to send less.
      collectives: those of the replica.
    """
    if not slices.shape.num_elements() or slices.values.shape[0] is None:
        return False
    sparse, dense = _bytes(slices)
    return slices.dtype in collectives.wire.gathers and sparse * collectives.size < 2 * dense


def _bytes(slices: tf.IndexedSlices) -> tuple[int, int]:
    """Bytes of the rows with their indices and count, and of the whole."""
    dense = slices.shape.num_elements() * slices.dtype.size
    rows = min(slices.values.shape[0], slices.shape[0])
    return rows * (dense // slices.shape[0] + 4) + 4, dense


def sum_rows(slices: tf.IndexedSlices, collectives: Collectives, name: str) -> tuple[tf.Tensor, tf.Tensor]:
    """The dense sum over replicas of slices of static dense shape, and this replica's own part of it."""
    places, positions = tf.unique(tf.cast(slices.indices, tf.int32))
    count = tf.size(places)
    rows = tf.math.unsorted_segment_sum(slices.values, positions, count)
    # Each replica's count stands before its indices, so that no other message is needed to take them apart.
    all_places, all_rows = collectives.all_gather([tf.concat([count[None], places], 0), rows], name=name)
    total, start = tf.zeros(slices.shape, slices.dtype), 0
    for rank in range(collectives.size):
        end = start + all_places[start + rank]
        mine = all_places[start + rank + 1 : end + rank + 1]
        total = tf.tensor_scatter_nd_add(total, mine[:, None], all_rows[start:end])
        start = end
    return total, tf.tensor_scatter_nd_add(tf.zeros(slices.shape, slices.dtype), places[:, None], rows)
