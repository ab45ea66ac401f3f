"""Buckets: small tensors share a message, large ones go alone, in the order in which the backward pass makes them.

A message costs a fixed time, a copy costs time by the byte. So tensors below `SMALL_BYTES` are copied into one vector and
sent as one message, and above it each is sent where it lies. The plan depends on shapes and dtypes alone, so the order
of summation is the same in every run.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.gradients.reducer import Reducer
from tfdist.strategy import State

SMALL_BYTES = 256 * 1024
BUCKET_BYTES = 4 * 1024 * 1024


def plan(
    specs: Sequence[tf.TensorSpec], small_bytes: int = SMALL_BYTES, bucket_bytes: int = BUCKET_BYTES
) -> list[list[int]]:
    """Deals tensors into buckets.

    Args:
      specs: static shapes and dtypes, in the order of the forward pass.
      small_bytes: a tensor of at least this size has a bucket of its own.
      bucket_bytes: a bucket of small tensors is closed before it would pass this size.

    Returns:
      Lists of indices into `specs`: each index once, one dtype in each bucket, last layers first.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[tf.DType, tuple[list[int], int]] = {}
    for i in reversed(range(len(specs))):
        size = specs[i].shape.num_elements() * specs[i].dtype.size
        if size >= small_bytes:
            buckets.append([i])
            continue
        members, filled = open_buckets.get(specs[i].dtype, ([], 0))
        if not members or filled + size > bucket_bytes:
            members, filled = [], 0
            buckets.append(members)
        members.append(i)
        open_buckets[specs[i].dtype] = (members, filled + size)
    return buckets


class Bucketed(Reducer):
    """Packs tensors into buckets and lets another reducer sum each: one call of it, and one state, a bucket."""

    def __init__(self, inner: Reducer, small_bytes: int = SMALL_BYTES, bucket_bytes: int = BUCKET_BYTES):
        """Args: inner: sums a bucket; small_bytes, bucket_bytes: see `plan`."""
        self._inner = inner
        self._limits = (small_bytes, bucket_bytes)

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """See base class."""
        return [state for spec in self._packed(specs) for state in self._inner.state([spec])]

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """See base class."""
        specs = [tf.TensorSpec(tensor.shape, tensor.dtype, f"tensor{i}") for i, tensor in enumerate(tensors)]
        sums: list[tf.Tensor] = list(tensors)
        left, new_state = list(state), []
        for number, (bucket, spec) in enumerate(zip(plan(specs, *self._limits), self._packed(specs), strict=True)):
            count = len(self._inner.state([spec]))
            mine, left = left[:count], left[count:]
            packed = _pack([tensors[i] for i in bucket])
            [total], after = self._inner.reduce([packed], mine, collectives, name=f"{name}/bucket{number}")
            new_state += after
            for i, part in zip(bucket, _unpack(total, [specs[i].shape for i in bucket]), strict=True):
                sums[i] = part
        return sums, new_state

    def _packed(self, specs: Sequence[tf.TensorSpec]) -> list[tf.TensorSpec]:
        return [_packed_spec(number, [specs[i] for i in b]) for number, b in enumerate(plan(specs, *self._limits))]


def _packed_spec(number: int, members: Sequence[tf.TensorSpec]) -> tf.TensorSpec:
    shape = members[0].shape if len(members) == 1 else [sum(spec.shape.num_elements() for spec in members)]
    return tf.TensorSpec(shape, members[0].dtype, f"bucket{number}")


def _pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def _unpack(packed: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    if len(shapes) == 1:
        return [packed]
    parts = tf.split(packed, [shape.num_elements() for shape in shapes])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
