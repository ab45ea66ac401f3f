"""The `Reducer` interface, which sums tensors over replicas, and reducers that wrap others."""

import abc
import logging
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.collectives.interface import tensor_bytes
from tfdist.distribution.strategy import State

Tensors: TypeAlias = Sequence[tf.Tensor]


class ReductionResult(NamedTuple):
    """The result of a reduction.

    Attributes:
      totals: exact or approximate sums over replicas, in the order, shapes and dtypes of the tensors; bitwise equal on
        every replica.
      sent: this replica's contribution to `totals`: its own tensors if the sum is exact, the part of them that was sent
        if it is lossy. Its sum over replicas is `totals`, up to rounding.
      state: the new state, in the order of `Reducer.state`, to be stored if the step is applied.
      witnesses: tensors, bitwise equal on every replica, that are all finite if and only if the tensors of every
        replica are.
    """

    totals: list[tf.Tensor]
    sent: list[tf.Tensor]
    state: list[tf.Tensor]
    witnesses: list[tf.Tensor]

    def all_finite(self, *tensors: tf.Tensor) -> tf.Tensor:
        """Returns a scalar bool: whether the reduced tensors of all replicas, and `tensors`, are finite."""
        # A sum is inf or NaN if any element is, in one pass over each tensor.
        return tf.reduce_all(tf.stack([tf.math.is_finite(tf.reduce_sum(x)) for x in (*self.witnesses, *tensors)]))


class Reducer(abc.ABC):
    """Sums lists of tensors over replicas, exactly or approximately; may have state.

    A reducer does not know what the tensors are. Its state is passed in and returned, so the caller decides whether a
    step is applied.

    Attributes:
      biased: whether the expected value of `sent` differs from the tensors, so the difference must be sent later.
      keeps_shapes: whether it needs each tensor in its own shape. Otherwise, buckets may concatenate several
        tensors to a vector.
      packs: whether it packs its own messages and should receive all tensors in one call, without buckets.
      stores_unsent: whether it stores what it does not send, which error feedback would count twice.
      experimental: whether it has not yet been shown both to train well and to save time on any link.
    """

    biased: bool = False
    keeps_shapes: bool = False
    packs: bool = False
    stores_unsent: bool = False
    experimental: bool = False

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """Returns the state needed for tensors of these names, shapes and dtypes; by default none."""
        return []

    @abc.abstractmethod
    def reduce(self, tensors: Tensors, state: Tensors, collectives: Collectives, *, name: str) -> ReductionResult:
        """Sums tensors over replicas.

        Args:
          tensors: dense tensors of static shapes, in the same order on every replica.
          state: current values, in the order of `state()`.
          collectives: collectives of the replica.
          name: name of the messages; the same on every replica, and unique within a step.
        """


class Sum(Reducer):
    """All-reduces the whole list as one message. Exact up to rounding. Cost: 2 n (N - 1) / N bytes for n bytes."""

    def reduce(self, tensors: Tensors, state: Tensors, collectives: Collectives, *, name: str) -> ReductionResult:
        """See base class. An inf or NaN of any replica also appears in the sum, which is therefore its own witness."""
        totals = collectives.all_reduce(tensors, name=name)
        return ReductionResult(totals, list(tensors), [], totals)


def tensor_specs(tensors: Tensors) -> list[tf.TensorSpec]:
    """Returns the specs of tensors; their names contain only the index of the tensor."""
    return [tf.TensorSpec(tensor.shape, tensor.dtype, f"tensor{i}") for i, tensor in enumerate(tensors)]


def split_at(values: Tensors, count: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the first `count` values of a state, and the remaining values."""
    return list(values[:count]), list(values[count:])


class PartitionedReducer(Reducer):
    """Passes each tensor of a list to the reducer of its partition.

    `partitions` has the tensor indices and the reducer of each partition; every index is in exactly one partition.
    """

    keeps_shapes = True

    def __init__(self, partitions: Sequence[tuple[Sequence[int], Reducer]]):
        self._partitions = [(list(indices), reducer) for indices, reducer in partitions if indices]

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        return [state for indices, reducer in self._partitions for state in reducer.state([specs[i] for i in indices])]

    def reduce(self, tensors: Tensors, state: Tensors, collectives: Collectives, *, name: str) -> ReductionResult:
        totals, sent = list(tensors), list(tensors)
        remaining, new_state, witnesses = list(state), [], []
        for index, (indices, reducer) in enumerate(self._partitions):
            members = [tensors[i] for i in indices]
            partition_state, remaining = split_at(remaining, len(reducer.state(tensor_specs(members))))
            reduction = reducer.reduce(members, partition_state, collectives, name=f"{name}/partition{index}")
            for i, total, summand in zip(indices, reduction.totals, reduction.sent, strict=True):
                totals[i], sent[i] = total, summand
            new_state += reduction.state
            witnesses += reduction.witnesses
        return ReductionResult(totals, sent, new_state, witnesses)


# Error feedback: the part that a lossy sum omits from one step is added to the next step.
#     x = g + e,   total = sum over replicas of sent(x),   e' = x - sent(x)
#
# The sums that were sent and the remaining error add up to the sum of all gradients so far: nothing is lost, only delayed.
# Each replica stores its own error, one tensor of the size of each gradient.
#
# Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback Fixes SignSGD, 2019
# (arXiv:1901.09847).


class ErrorFeedback(Reducer):
    """Stores the part that an inner reducer did not send, and adds it to the next sum.

    Around an exact reducer, it sends the error that an earlier lossy reducer left; after that, the error is zero.
    """

    def __init__(self, inner: Reducer):
        self.inner = inner
        self.keeps_shapes = inner.keeps_shapes

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """See base class. Returns one error per tensor, then the inner reducer's state."""
        errors = [State(f"{spec.name}/error", tuple(spec.shape), spec.dtype, per_replica=True) for spec in specs]
        return errors + self.inner.state(specs)

    def reduce(self, tensors: Tensors, state: Tensors, collectives: Collectives, *, name: str) -> ReductionResult:
        errors, inner_state = split_at(state, len(tensors))
        inputs = [tensor + error for tensor, error in zip(tensors, errors, strict=True)]
        reduction = self.inner.reduce(inputs, inner_state, collectives, name=name)
        new_errors = [x - sent for x, sent in zip(inputs, reduction.sent, strict=True)]
        return ReductionResult(reduction.totals, reduction.sent, new_errors + reduction.state, reduction.witnesses)


SPARSE_MIN_BYTES = 256 * 1024  # smaller tensors are summed faster in a dense bucket

_log = logging.getLogger(__name__)


class SparseRows(Reducer):
    """Sums `tf.IndexedSlices` as rows if that sends less than an exact dense sum, and other tensors with an inner reducer.

    Rows with the same index are summed first. Then indices and rows, whose number may differ between replicas, are
    gathered and summed exactly in the order of ranks. Cost: r rows of b bytes take r (b + 4) + 4 bytes, received from
    N - 1 replicas. A dense sum of V rows sends 2 V b (N - 1) / N. Because shapes are static, r is assumed to be the
    number of indices, at most V.

    Which tensors are sparse is known only when a step is traced, after the state has been requested. The inner reducer
    therefore has a separate call and state for each tensor, which stays unused while the tensor is sent as rows. Wrap
    only the reducer of variables that may be sparse, as `PartitionedReducer` does, and do not use this inside error
    feedback, which adds dense tensors.
    """

    keeps_shapes = True

    def __init__(self, inner: Reducer, names: Sequence[str] = ()):
        """Wraps a reducer of lists of one dense tensor; `names` are the tensors' names in the log."""
        self._inner = inner
        self._names = names
        self._logged_indices: set[int] = set()
        self.biased = inner.biased

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """See base class. Returns the inner reducer's state for each tensor separately."""
        return [state for spec in specs for state in self._inner.state([spec])]

    def reduce(
        self, tensors: Sequence[tf.Tensor | tf.IndexedSlices], state: Tensors, collectives: Collectives, *, name: str
    ) -> ReductionResult:
        """See base class. Tensors may be `tf.IndexedSlices` of static dense shape; `totals` and `sent` are dense."""
        result = ReductionResult([], [], [], [])
        remaining = list(state)
        for i, (tensor, spec) in enumerate(zip(tensors, tensor_specs(tensors), strict=True)):
            tensor_state, remaining = split_at(remaining, len(self._inner.state([spec])))
            if isinstance(tensor, tf.IndexedSlices) and self._sends_rows(tensor, collectives, i):
                total, sent = sum_rows(tensor, collectives, f"{name}/{i}")
                reduction = ReductionResult([total], [sent], tensor_state, [total])
            else:
                dense = tf.reshape(tf.convert_to_tensor(tensor), spec.shape)
                reduction = self._inner.reduce([dense], tensor_state, collectives, name=f"{name}/{i}")
            for values, part_values in zip(result, reduction, strict=True):
                values += part_values
        return result

    def _sends_rows(self, slices: tf.IndexedSlices, collectives: Collectives, index: int) -> bool:
        """Returns whether to send rows. Logs the choice once per tensor."""
        is_sparse = rows_send_less(slices, collectives)
        if _has_static_rows(slices) and index not in self._logged_indices:
            self._logged_indices.add(index)
            name = self._names[index] if self._names else f"tensor {index}"
            message = "The gradient of %s is sent %s: its rows take %d bytes, the dense tensor %d."
            _log.info(message, name, "as rows" if is_sparse else "dense", *_bytes(slices))
        return is_sparse


def rows_send_less(slices: tf.IndexedSlices, collectives: Collectives) -> bool:
    """Returns whether gathering the rows sends fewer bytes than an exact dense sum; see `SparseRows`.

    If the dense shape or the number of rows is unknown during tracing, the dense sum is assumed to send less.
    """
    if not _has_static_rows(slices):
        return False
    sparse, dense = _bytes(slices)
    return slices.dtype in collectives.dtypes.gatherable and sparse * collectives.size < 2 * dense


def _has_static_rows(slices: tf.IndexedSlices) -> bool:
    return bool(slices.shape.num_elements()) and slices.values.shape[0] is not None


def _bytes(slices: tf.IndexedSlices) -> tuple[int, int]:
    """Returns the size in bytes of the rows with their indices and count, and of the dense tensor."""
    dense = tensor_bytes(slices)
    rows = min(slices.values.shape[0], slices.shape[0])
    return rows * (dense // slices.shape[0] + 4) + 4, dense


def sum_rows(slices: tf.IndexedSlices, collectives: Collectives, name: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the dense sum over replicas of slices with a static dense shape, and this replica's contribution."""
    indices, positions = tf.unique(tf.cast(slices.indices, tf.int32))
    count = tf.size(indices)
    rows = tf.math.unsorted_segment_sum(slices.values, positions, count)
    # Each replica's count precedes its indices, so no other message is needed to split the gathered rows.
    all_indices, all_rows = collectives.all_gather([tf.concat([count[None], indices], 0), rows], name=name)
    total, start = tf.zeros(slices.shape, slices.dtype), 0
    for rank in range(collectives.size):
        end = start + all_indices[start + rank]
        rank_indices = all_indices[start + rank + 1 : end + rank + 1]
        total = tf.tensor_scatter_nd_add(total, rank_indices[:, None], all_rows[start:end])
        start = end
    return total, tf.tensor_scatter_nd_add(tf.zeros(slices.shape, slices.dtype), indices[:, None], rows)
