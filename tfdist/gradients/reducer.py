"""The contract `Reducer`: sums each replica's tensors over all replicas; and reducers that wrap others."""

import abc
import logging
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.collectives.interface import tensor_bytes
from tfdist.distribution.strategy import State


class Reduced(NamedTuple):
    """The result of a reduction.

    Attributes:
      totals: exact or approximate sums over replicas, in the order, shapes and dtypes of the tensors; bitwise equal on
        every replica.
      sent: this replica's contribution to `totals`: its own tensors if the sum is exact, the part of them that was sent
        if it is lossy. Adds up to `totals` over the replicas, up to rounding.
      state: the new state, in the order of `Reducer.state`, to be stored if the step is applied.
      witnesses: tensors, bitwise equal on every replica, that are all finite if and only if the tensors of every
        replica are.
    """

    totals: list[tf.Tensor]
    sent: list[tf.Tensor]
    state: list[tf.Tensor]
    witnesses: list[tf.Tensor]

    def all_finite(self, *others: tf.Tensor) -> tf.Tensor:
        """Returns whether the tensors of all replicas, and others, are finite: a scalar bool."""
        # A sum is inf or NaN if any element is, in one pass over each tensor.
        return tf.reduce_all(tf.stack([tf.math.is_finite(tf.reduce_sum(x)) for x in (*self.witnesses, *others)]))


class Reducer(abc.ABC):
    """Sums lists of tensors over replicas, exactly or approximately; may have state.

    A reducer does not know what the tensors are. Its state is passed in and returned, so that the caller decides
    whether a step is applied.

    Attributes:
      biased: whether the expected value of `sent` differs from the tensors, so that the rest must be sent later.
      keeps_shapes: whether it needs each tensor in its own shape; otherwise buckets may pass vectors of several
        tensors.
      packs: whether it packs its own messages and should get all tensors in one call: buckets would only add messages.
      remembers: whether it stores what it does not send, so that error feedback would count it twice.
      experimental: whether it has yet to be shown both to train well and to save time on some link.
    """

    biased: bool = False
    keeps_shapes: bool = False
    packs: bool = False
    remembers: bool = False
    experimental: bool = False

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """Returns the state needed for tensors of these names, shapes and dtypes; by default none."""
        return []

    @abc.abstractmethod
    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> Reduced:
        """Sums tensors over replicas.

        Args:
          tensors: dense tensors of static shapes, in the same order on every replica.
          state: current values, in the order of `state()`.
          collectives: collectives of the replica.
          name: names the messages; the same on every replica, and unique within a step.
        """


class Sum(Reducer):
    """All-reduces the whole list as one message. Exact up to rounding; cost 2 n (N - 1) / N bytes."""

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> Reduced:
        """See base class. An inf or NaN of any replica is visible in the sum, which is therefore its own witness."""
        totals = collectives.all_reduce(tensors, name=name)
        return Reduced(totals, list(tensors), [], totals)


def specs_of(tensors: Sequence[tf.Tensor]) -> list[tf.TensorSpec]:
    """Returns the shapes and dtypes of tensors; names contain only their index."""
    return [tf.TensorSpec(tensor.shape, tensor.dtype, f"tensor{i}") for i, tensor in enumerate(tensors)]


def split_at(values: Sequence[tf.Tensor], count: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the first `count` values of a state, and the rest."""
    return list(values[:count]), list(values[count:])


class PartitionedReducer(Reducer):
    """Passes each tensor of a list to the reducer of its partition."""

    def __init__(self, partitions: Sequence[tuple[Sequence[int], Reducer]]):
        """Initializes the partitions.

        Args:
          partitions: for each partition, the indices of its tensors in the list and their reducer; every index is in
            exactly one partition.
        """
        self._partitions = [(list(indices), reducer) for indices, reducer in partitions if indices]
        self.keeps_shapes = True

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """See base class."""
        return [state for indices, reducer in self._partitions for state in reducer.state([specs[i] for i in indices])]

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> Reduced:
        """See base class."""
        totals, sent = list(tensors), list(tensors)
        remaining, new_state, witnesses = list(state), [], []
        for number, (indices, reducer) in enumerate(self._partitions):
            members = [tensors[i] for i in indices]
            own_state, remaining = split_at(remaining, len(reducer.state(specs_of(members))))
            part = reducer.reduce(members, own_state, collectives, name=f"{name}/partition{number}")
            for i, total, summand in zip(indices, part.totals, part.sent, strict=True):
                totals[i], sent[i] = total, summand
            new_state += part.state
            witnesses += part.witnesses
        return Reduced(totals, sent, new_state, witnesses)


# Error feedback: what a lossy sum left out of a step is added to the next one.
#     x = g + e,   total = sum over replicas of sent(x),   e' = x - sent(x)
#
# The sums sent and the remaining error add up to the sum of all gradients so far: nothing is lost, only delayed. Each
# replica stores its own error: one tensor of the size of each gradient.
#
# Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback Fixes SignSGD, 2019
# (arXiv:1901.09847).


class ErrorFeedback(Reducer):
    """Stores the part that another reducer did not send, and adds it to the next sum.

    Around an exact reducer, it sends the error that an earlier, lossy one has left; afterwards there is none.
    """

    def __init__(self, inner: Reducer):
        """Wraps a reducer.

        Args:
          inner: a reducer, usually lossy.
        """
        self.inner = inner
        self.keeps_shapes = inner.keeps_shapes

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """See base class: one error per tensor, then the inner reducer's state."""
        errors = [State(f"{spec.name}/error", tuple(spec.shape), spec.dtype, per_replica=True) for spec in specs]
        return errors + self.inner.state(specs)

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> Reduced:
        """See base class."""
        errors, rest = split_at(state, len(tensors))
        corrected = [tensor + error for tensor, error in zip(tensors, errors, strict=True)]
        inner = self.inner.reduce(corrected, rest, collectives, name=name)
        new_errors = [x - sent for x, sent in zip(corrected, inner.sent, strict=True)]
        return Reduced(inner.totals, inner.sent, new_errors + inner.state, inner.witnesses)


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
        self._logged: set[int] = set()
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
        result = Reduced([], [], [], [])
        remaining = list(state)
        for i, (tensor, spec) in enumerate(zip(tensors, specs_of(tensors), strict=True)):
            own_state, remaining = split_at(remaining, len(self._inner.state([spec])))
            if isinstance(tensor, tf.IndexedSlices) and self._goes_as_rows(tensor, collectives, i):
                total, sent = sum_rows(tensor, collectives, f"{name}/{i}")
                part = Reduced([total], [sent], own_state, [total])
            else:
                dense = tf.reshape(tf.convert_to_tensor(tensor), spec.shape)
                part = self._inner.reduce([dense], own_state, collectives, name=f"{name}/{i}")
            for values, part_values in zip(result, part, strict=True):
                values += part_values
        return result

    def _goes_as_rows(self, slices: tf.IndexedSlices, collectives: Collectives, index: int) -> bool:
        """Returns whether to send rows; logs the choice once per tensor."""
        if not _has_static_rows(slices):
            return False
        is_sparse = rows_send_less(slices, collectives)
        if index not in self._logged:
            self._logged.add(index)
            name = self._names[index] if self._names else f"tensor {index}"
            message = "The gradient of %s is sent %s: its rows are %d bytes, the dense tensor is %d."
            _log.info(message, name, "as rows" if is_sparse else "dense", *_bytes(slices))
        return is_sparse


def rows_send_less(slices: tf.IndexedSlices, collectives: Collectives) -> bool:
    """Returns whether gathering rows sends less than an exact dense sum; see `SparseRows` for the cost.

    Args:
      slices: slices of static dense shape; if the number of rows is unknown during tracing, dense is assumed to be
        less.
      collectives: collectives of the replica.
    """
    if not _has_static_rows(slices):
        return False
    sparse, dense = _bytes(slices)
    return slices.dtype in collectives.wire.gathers and sparse * collectives.size < 2 * dense


def _has_static_rows(slices: tf.IndexedSlices) -> bool:
    return bool(slices.shape.num_elements()) and slices.values.shape[0] is not None


def _bytes(slices: tf.IndexedSlices) -> tuple[int, int]:
    """Returns the bytes of the rows with their indices and count, and of the dense tensor."""
    dense = tensor_bytes(slices)
    rows = min(slices.values.shape[0], slices.shape[0])
    return rows * (dense // slices.shape[0] + 4) + 4, dense


def sum_rows(slices: tf.IndexedSlices, collectives: Collectives, name: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the dense sum over replicas of slices of static dense shape, and this replica's contribution."""
    indices, positions = tf.unique(tf.cast(slices.indices, tf.int32))
    count = tf.size(indices)
    rows = tf.math.unsorted_segment_sum(slices.values, positions, count)
    # Each replica's count precedes its indices, so that no other message is needed to split the gathered rows.
    all_indices, all_rows = collectives.all_gather([tf.concat([count[None], indices], 0), rows], name=name)
    total, start = tf.zeros(slices.shape, slices.dtype), 0
    for rank in range(collectives.size):
        end = start + all_indices[start + rank]
        rank_indices = all_indices[start + rank + 1 : end + rank + 1]
        total = tf.tensor_scatter_nd_add(total, rank_indices[:, None], all_rows[start:end])
        start = end
    return total, tf.tensor_scatter_nd_add(tf.zeros(slices.shape, slices.dtype), indices[:, None], rows)
