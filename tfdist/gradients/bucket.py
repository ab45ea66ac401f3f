"""Gradient buckets: small tensors share a message, large ones are sent alone, in the order of the backward pass.

A message has a fixed cost, and a copy has a cost per byte. Tensors below `SMALL_BYTES` are therefore copied into one
vector and sent as one message; larger ones are sent without a copy. The plan depends only on shapes and dtypes, so the
order of summation is the same in every run.
"""

import itertools
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.collectives.interface import tensor_bytes
from tfdist.distribution.strategy import State
from tfdist.gradients.reducer import Reducer, ReductionResult, Tensors, tensor_specs

# Between processes, the fixed cost of a message, 1 to 2 ms, is about the time to transfer this many bytes.
SMALL_BYTES = 2 * 1024 * 1024
BUCKET_BYTES = 4 * 1024 * 1024
BACKWARD, SMALLEST = "backward", "smallest"  # orders in which buckets are sent
BUCKET_ORDERS = (BACKWARD, SMALLEST)


def plan(
    specs: Sequence[tf.TensorSpec], small_bytes: int = SMALL_BYTES, bucket_bytes: int = BUCKET_BYTES
) -> list[list[int]]:
    """Assigns tensors to buckets.

    Args:
      specs: shapes and dtypes, in the order of the forward pass. A tensor of unknown shape, on one device, has its own bucket.
      small_bytes: a tensor of at least this size has its own bucket.
      bucket_bytes: maximum size of a bucket of small tensors.

    Returns:
      Lists of indices into `specs`: each index occurs once, each bucket has one dtype, and the last layers come first.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[tf.DType, tuple[list[int], int]] = {}
    for i in reversed(range(len(specs))):
        size = tensor_bytes(specs[i]) if specs[i].shape.is_fully_defined() else small_bytes
        if size >= small_bytes:
            buckets.append([i])
            continue
        members, bucket_size = open_buckets.get(specs[i].dtype, ([], 0))
        if not members or bucket_size + size > bucket_bytes:
            members, bucket_size = [], 0
            buckets.append(members)
        members.append(i)
        open_buckets[specs[i].dtype] = (members, bucket_size + size)
    return buckets


class Bucketed(Reducer):
    """Packs tensors into buckets. An inner reducer sums each bucket in a separate call, with its own state.

    A reducer that needs shapes receives the tensors of a bucket unpacked, as one list.
    """

    def __init__(
        self,
        inner: Reducer,
        small_bytes: int = SMALL_BYTES,
        bucket_bytes: int = BUCKET_BYTES,
        order: str = BACKWARD,
    ):
        """Wraps a reducer.

        Args:
          inner: reducer that sums a bucket.
          small_bytes: see `plan`.
          bucket_bytes: see `plan`.
          order: "backward": each bucket is sent when the backward pass has computed it; "smallest": smaller buckets are
            sent first, so a large one may wait for layers whose backward pass comes later.
        """
        self._inner = inner
        self._order = order
        self._limits = (small_bytes, bucket_bytes)
        self.biased = inner.biased
        self.keeps_shapes = inner.keeps_shapes

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        return [state for _, bucket in self._buckets(specs) for state in self._inner.state(bucket)]

    def reduce(self, tensors: Tensors, state: Tensors, collectives: Collectives, *, name: str) -> ReductionResult:
        totals, sent = list(tensors), list(tensors)
        buckets = self._buckets(tensor_specs(tensors))
        remaining = iter(state)
        bucket_states = [list(itertools.islice(remaining, len(self._inner.state(bucket)))) for _, bucket in buckets]
        sizes = [sum(map(tensor_bytes, bucket)) for _, bucket in buckets] if self._order == SMALLEST else []
        reductions: dict[int, ReductionResult] = {}
        previous: list[tf.Tensor] = []
        for index in sorted(range(len(buckets)), key=lambda i: sizes[i] if sizes else i):
            members = [tensors[i] for i in buckets[index][0]]
            packed = members if self.keeps_shapes else [_pack(members)]
            if self._order == SMALLEST:
                with tf.control_dependencies(previous):
                    packed = previous = [tf.identity(tensor) for tensor in packed]
            reductions[index] = self._inner.reduce(
                packed, bucket_states[index], collectives, name=f"{name}/bucket{index}"
            )
            shapes = [tensor.shape for tensor in members]
            for results, packed_parts in ((totals, reductions[index].totals), (sent, reductions[index].sent)):
                member_results = packed_parts if self.keeps_shapes else _unpack(packed_parts[0], shapes)
                for i, tensor in zip(buckets[index][0], member_results, strict=True):
                    results[i] = tensor
        ordered_reductions = [reductions[index] for index in range(len(buckets))]
        new_state = [value for reduction in ordered_reductions for value in reduction.state]
        witnesses = [witness for reduction in ordered_reductions for witness in reduction.witnesses]
        return ReductionResult(totals, sent, new_state, witnesses)

    def _buckets(self, specs: Sequence[tf.TensorSpec]) -> list[tuple[list[int], list[tf.TensorSpec]]]:
        """Returns, for each bucket, the indices of its tensors and the specs that the inner reducer receives."""
        buckets = []
        for members in plan(specs, *self._limits):
            member_specs = [specs[i] for i in members]
            buckets.append((members, member_specs if self.keeps_shapes else [_bucket_spec(member_specs)]))
        return buckets


def _bucket_spec(members: Sequence[tf.TensorSpec]) -> tf.TensorSpec:
    """Returns the spec of a packed bucket; its name is unique, because each tensor is in one bucket."""
    if len(members) == 1:
        return members[0]
    size = sum(spec.shape.num_elements() for spec in members)
    return tf.TensorSpec([size], members[0].dtype, f"{members[0].name}..{members[-1].name}")


def _pack(tensors: Tensors) -> tf.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    with tf.name_scope("pack"):  # in profiles
        return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def _unpack(packed: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    if len(shapes) == 1:
        return [packed]
    with tf.name_scope("unpack"):
        parts = tf.split(packed, [shape.num_elements() for shape in shapes])
        return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
