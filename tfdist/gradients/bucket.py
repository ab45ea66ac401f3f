"""Buckets: small tensors share a message, large ones go alone, in the order in which the backward pass makes them.

A message costs a fixed time, a copy costs time by the byte. So tensors below `SMALL_BYTES` are copied into one vector and
sent as one message, and above it each is sent where it lies. The plan depends on shapes and dtypes alone, so the order
of summation is the same in every run.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.distribution.strategy import State
from tfdist.gradients.reducer import Reduced, Reducer, specs_of, split_at

SMALL_BYTES = 2 * 1024 * 1024  # what a message costs by itself, 1 to 2 ms between processes, carries about as much
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
    """Packs tensors into buckets and lets another reducer sum each: one call of it, and one state, a bucket.

    A reducer that needs shapes gets the tensors of a bucket as they are, as one list.
    """

    def __init__(self, inner: Reducer, small_bytes: int = SMALL_BYTES, bucket_bytes: int = BUCKET_BYTES):
        """Args: inner: sums a bucket; small_bytes, bucket_bytes: see `plan`."""
        self._inner = inner
        self._limits = (small_bytes, bucket_bytes)
        self.biased = inner.biased
        self.keeps_shapes = inner.keeps_shapes

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        """See base class."""
        return [state for _, bucket in self._buckets(specs) for state in self._inner.state(bucket)]

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> Reduced:
        """See base class."""
        totals, sent = list(tensors), list(tensors)
        left, new_state, witnesses = list(state), [], []
        for number, (members, bucket) in enumerate(self._buckets(specs_of(tensors))):
            mine, left = split_at(left, len(self._inner.state(bucket)))
            given = [tensors[i] for i in members]
            packed = given if self.keeps_shapes else [_pack(given)]
            part = self._inner.reduce(packed, mine, collectives, name=f"{name}/bucket{number}")
            shapes = [tensor.shape for tensor in given]
            for whole, parts in ((totals, part.totals), (sent, part.sent)):
                for i, tensor in zip(members, parts if self.keeps_shapes else _unpack(parts[0], shapes), strict=True):
                    whole[i] = tensor
            new_state += part.state
            witnesses += part.witnesses
        return Reduced(totals, sent, new_state, witnesses)

    def _buckets(self, specs: Sequence[tf.TensorSpec]) -> list[tuple[list[int], list[tf.TensorSpec]]]:
        """The places of each bucket's tensors, and the specs of what the inner reducer gets of it."""
        found = []
        for members in plan(specs, *self._limits):
            own = [specs[i] for i in members]
            found.append((members, own if self.keeps_shapes else [_packed_spec(own)]))
        return found


def _packed_spec(members: Sequence[tf.TensorSpec]) -> tf.TensorSpec:
    """What `_pack` makes of tensors; its name is a bucket's own, as each tensor is in one bucket."""
    if len(members) == 1:
        return members[0]
    size = sum(spec.shape.num_elements() for spec in members)
    return tf.TensorSpec([size], members[0].dtype, f"{members[0].name}..{members[-1].name}")


def _pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    if len(tensors) == 1:
        return tensors[0]
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)


def _unpack(packed: tf.Tensor, shapes: Sequence[tf.TensorShape]) -> list[tf.Tensor]:
    if len(shapes) == 1:
        return [packed]
    parts = tf.split(packed, [shape.num_elements() for shape in shapes])
    return [tf.reshape(part, shape) for part, shape in zip(parts, shapes, strict=True)]
