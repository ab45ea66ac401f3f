"""Packs the parts of a code into one vector of the dtype in which an engine sends bytes."""

import dataclasses
import itertools
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Wire
from tfdist.collectives.tensor_bytes import tensor_bytes

_UNSIGNED = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32, 8: tf.uint64}


@dataclasses.dataclass(frozen=True)
class Packing:
    """The layout of the parts of a code in one vector.

    Parts are ordered by element size, the largest first, and zeros pad the vector to a multiple of the largest, so that
    each part is aligned in a view of all bytes as its dtype. `join` and `take` copy, and are to be compiled together
    with what produces and consumes the parts; `on_wire` and `views` only reinterpret bytes as another dtype.

    Attributes:
      specs: shapes and dtypes of the parts.
      wire: dtypes of the engine.
    """

    specs: tuple[tf.TensorSpec, ...]
    wire: Wire

    @property
    def bytes(self) -> int:
        """The packed length in bytes."""
        grain = max(self.wire.packed.size, *(spec.dtype.size for spec in self.specs))
        return -(-self._used // grain) * grain

    def join(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the bytes of the parts as a vector of the unsigned dtype of the smallest element size."""
        unit = _UNSIGNED[min(spec.dtype.size for spec in self.specs)]
        vectors = [_seen_as(tf.reshape(parts[i], [-1]), unit) for i in self._order]
        spare = (self.bytes - self._used) // unit.size
        return tf.concat([*vectors, tf.zeros([spare], unit)] if spare else vectors, axis=0)

    def on_wire(self, joined: tf.Tensor) -> tf.Tensor:
        """Returns the result of `join` as a vector of `wire.packed`."""
        return _seen_as(joined, self.wire.packed)

    def views(self, packed: tf.Tensor, replicas: int) -> list[tf.Tensor]:
        """Returns gathered packed codes in each dtype of the specs, [replicas, length]."""
        return [tf.reshape(_seen_as(packed, dtype), [replicas, self.bytes // dtype.size]) for dtype in self._dtypes]

    def take(self, views: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the parts, from `views`, in the shapes of the specs with a first dim of replicas."""
        by_dtype = dict(zip(self._dtypes, views, strict=True))
        lengths = [tensor_bytes(self.specs[i]) for i in self._order]
        starts = dict(zip(self._order, itertools.accumulate(lengths, initial=0), strict=False))
        parts = []
        for i, spec in enumerate(self.specs):
            start = starts[i] // spec.dtype.size
            part = by_dtype[spec.dtype][:, start : start + spec.shape.num_elements()]
            parts.append(tf.reshape(part, [part.shape[0], *spec.shape]))
        return parts

    @property
    def _used(self) -> int:
        return sum(map(tensor_bytes, self.specs))

    @property
    def _order(self) -> list[int]:
        return sorted(range(len(self.specs)), key=lambda i: -self.specs[i].dtype.size)

    @property
    def _dtypes(self) -> list[tf.DType]:
        return list(dict.fromkeys(spec.dtype for spec in self.specs))


def _seen_as(vector: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if vector.dtype == dtype:
        return vector
    if vector.dtype.size < dtype.size:
        vector = tf.reshape(vector, [-1, dtype.size // vector.dtype.size])
    return tf.reshape(tf.bitcast(vector, dtype), [-1])
