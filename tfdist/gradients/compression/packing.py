"""Codes as the engines carry them: the parts of a code as one vector of the dtype that an engine takes for bytes."""

import dataclasses
import itertools
from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives import Wire

_UNSIGNED = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32, 8: tf.uint64}


@dataclasses.dataclass(frozen=True)
class Packing:
    """How the parts of a code stand behind each other.

    They stand in the order of their element sizes, the largest first, and zeros fill up to a multiple of the largest:
    so each part is where all bytes, seen as numbers of its dtype, have it. `join` and `take` copy, and are made to be
    compiled together with what makes and reads the parts; `on_wire` and `views` only see bytes as another dtype.

    Attributes:
      specs: shapes and dtypes of the parts.
      wire: of the engine.
    """

    specs: tuple[tf.TensorSpec, ...]
    wire: Wire

    @property
    def bytes(self) -> int:
        """Length of what is packed."""
        grain = max(self.wire.packed.size, *(spec.dtype.size for spec in self.specs))
        return -(-self._used // grain) * grain

    def join(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the bytes of the parts as a vector of the unsigned dtype that has the size of the smallest elements."""
        unit = _UNSIGNED[min(spec.dtype.size for spec in self.specs)]
        vectors = [_seen_as(tf.reshape(parts[i], [-1]), unit) for i in self._order]
        spare = (self.bytes - self._used) // unit.size
        return tf.concat([*vectors, tf.zeros([spare], unit)] if spare else vectors, axis=0)

    def on_wire(self, joined: tf.Tensor) -> tf.Tensor:
        """Returns what `join` returned as a vector of `wire.packed`."""
        return _seen_as(joined, self.wire.packed)

    def views(self, packed: tf.Tensor, replicas: int) -> list[tf.Tensor]:
        """Returns what `replicas` replicas have packed and gathered in each dtype of the specs, [replicas, length]."""
        return [tf.reshape(_seen_as(packed, dtype), [replicas, self.bytes // dtype.size]) for dtype in self._dtypes]

    def take(self, views: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the parts in the shapes of the specs, with the replicas as a first dim, of what `views` returned."""
        by_dtype = dict(zip(self._dtypes, views, strict=True))
        lengths = [_bytes(self.specs[i]) for i in self._order]
        starts = dict(zip(self._order, itertools.accumulate(lengths, initial=0), strict=False))
        parts = []
        for i, spec in enumerate(self.specs):
            start = starts[i] // spec.dtype.size
            part = by_dtype[spec.dtype][:, start : start + spec.shape.num_elements()]
            parts.append(tf.reshape(part, [part.shape[0], *spec.shape]))
        return parts

    @property
    def _used(self) -> int:
        return sum(map(_bytes, self.specs))

    @property
    def _order(self) -> list[int]:
        return sorted(range(len(self.specs)), key=lambda i: -self.specs[i].dtype.size)

    @property
    def _dtypes(self) -> list[tf.DType]:
        return list(dict.fromkeys(spec.dtype for spec in self.specs))


def _bytes(spec: tf.TensorSpec) -> int:
    return spec.shape.num_elements() * spec.dtype.size


def _seen_as(vector: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if vector.dtype == dtype:
        return vector
    if vector.dtype.size < dtype.size:
        vector = tf.reshape(vector, [-1, dtype.size // vector.dtype.size])
    return tf.reshape(tf.bitcast(vector, dtype), [-1])
