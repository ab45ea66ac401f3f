"""Gradient buckets: small tensors share a message, large ones are sent alone, in the order of the backward pass.

A message costs a fixed time, and a copy costs time per byte. So tensors below `SMALL_BYTES` are copied into one vector
and sent as one message; larger ones are sent without a copy. The plan depends only on shapes and dtypes, so the order
of summation is the same in every run.
"""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.distribution.strategy import State
from tfdist.gradients.reducer import Reduced, Reducer, specs_of, split_at

# Between processes, the fixed cost of a message, 1 to 2 ms, is about the time to transfer this many bytes.
SMALL_BYTES = 2 * 1024 * 1024
BUCKET_BYTES = 4 * 1024 * 1024


def plan(
    specs: Sequence[tf.TensorSpec], small_bytes: int = SMALL_BYTES, bucket_bytes: int = BUCKET_BYTES
) -> list[list[int]]:
    """Assigns tensors to buckets.

    Args:
      specs: static shapes and dtypes, in the order of the forward pass.
      small_bytes: a tensor of at least this size has its own bucket.
      bucket_bytes: maximum size of a bucket of small tensors.

    Returns:
      Lists of indices into `specs`: each index occurs once, each bucket has one dtype, and the last layers come first.
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
    """Packs tensors into buckets, each of which another reducer sums in one call, with its own state.

    A reducer that needs shapes gets the tensors of a bucket unpacked, as one list.
    """

    def __init__(self, inner: Reducer, small_bytes: int = SMALL_BYTES, bucket_bytes: int = BUCKET_BYTES):
        """Wraps a reducer.

        Args:
          inner: reducer that sums a bucket.
          small_bytes: see `plan`.
          bucket_bytes: see `plan`.
        """
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
        """Returns for each bucket the indices of its tensors, and the specs that the inner reducer gets."""
        found = []
        for members in plan(specs, *self._limits):
            own = [specs[i] for i in members]
            found.append((members, own if self.keeps_shapes else [_packed_spec(own)]))
        return found


def _packed_spec(members: Sequence[tf.TensorSpec]) -> tf.TensorSpec:
    """Returns the spec of a packed bucket; its name is unique, because each tensor is in one bucket."""
    if len(members) == 1:
        return members[0]
    size = sum(spec.shape.num_elements() for spec in members)
    return tf.TensorSpec([size], members[0].dtype, f"{members[0].name}..{members[-1].name}")


def _pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
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
