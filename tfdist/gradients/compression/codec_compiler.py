"""Encodes tensors as packed bytes with a codec, and decodes them; compiled by XLA where that is faster."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import Wire
from tfdist.collectives.interface import tensor_bytes
from tfdist.gradients.compression.codec import Codec

_UNSIGNED = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32, 8: tf.uint64}


@dataclasses.dataclass(frozen=True)
class Packing:
    """The layout of the parts of a code in one vector.

    Parts are ordered by element size, the largest first, and zeros pad the vector to a multiple of the largest. Each part
    is therefore aligned in a view of all bytes as its dtype. `join` and `take` copy, and should be compiled together with
    the code that produces and consumes the parts; `to_wire` and `views` only reinterpret bytes as another dtype.

    Attributes:
      specs: shapes and dtypes of the parts.
      wire: dtypes of the engine.
    """

    specs: tuple[tf.TensorSpec, ...]
    wire: Wire

    @property
    def bytes(self) -> int:
        """The packed length in bytes."""
        alignment = max(self.wire.packed.size, *(spec.dtype.size for spec in self.specs))
        return -(-self._content_bytes // alignment) * alignment

    def join(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the bytes of the parts as a vector of the unsigned dtype of the smallest element size."""
        unit = _UNSIGNED[min(spec.dtype.size for spec in self.specs)]
        vectors = [_bitcast_vector(tf.reshape(parts[i], [-1]), unit) for i in self._order]
        padding = (self.bytes - self._content_bytes) // unit.size
        return tf.concat([*vectors, tf.zeros([padding], unit)] if padding else vectors, axis=0)

    def to_wire(self, code: tf.Tensor) -> tf.Tensor:
        """Returns the result of `join` as a vector of `wire.packed`."""
        return _bitcast_vector(code, self.wire.packed)

    def views(self, packed: tf.Tensor, replicas: int) -> list[tf.Tensor]:
        """Returns gathered packed codes in each dtype of the specs, [replicas, length]."""
        return [
            tf.reshape(_bitcast_vector(packed, dtype), [replicas, self.bytes // dtype.size]) for dtype in self._dtypes
        ]

    def take(self, views: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the parts from `views`, in the shapes of the specs with replicas as an additional first dim."""
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
    def _content_bytes(self) -> int:
        return sum(map(tensor_bytes, self.specs))

    @property
    def _order(self) -> list[int]:
        return sorted(range(len(self.specs)), key=lambda i: -self.specs[i].dtype.size)

    @property
    def _dtypes(self) -> list[tf.DType]:
        return list(dict.fromkeys(spec.dtype for spec in self.specs))


def _bitcast_vector(vector: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if vector.dtype == dtype:
        return vector
    if vector.dtype.size < dtype.size:
        vector = tf.reshape(vector, [-1, dtype.size // vector.dtype.size])
    return tf.reshape(tf.bitcast(vector, dtype), [-1])


_CHECK = tf.TensorSpec([1], tf.float32)
# With fewer elements, compilation takes longer than it saves in a typical run.
_MIN_COMPILED_SIZE = 16 * 1024


class CodecCompiler:
    """Packs the codes of tensors, each with the 4 bytes of its `Codec.check`, and decodes packed codes.

    XLA can compile any part without communication, even inside a larger function. One function is created and cached per
    tensor size; functions for small tensors are not compiled.
    """

    def __init__(self, codec: Codec):
        self._codec = codec
        self._packings: dict[tuple[int, Wire], Packing] = {}
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def packing(self, size: int, wire: Wire) -> Packing:
        """Returns the packing of a vector's code, followed by its check."""
        if (size, wire) not in self._packings:
            vector, seed = tf.TensorSpec([size], tf.float32), tf.TensorSpec([2], tf.int32)
            encode = tf.function(self._codec.encode, autograph=False).get_concrete_function(vector, seed)
            specs = [tf.TensorSpec(part.shape, part.dtype) for part in encode.structured_outputs]
            self._packings[size, wire] = Packing((*specs, _CHECK), wire)
        return self._packings[size, wire]

    def encode(self, tensor: tf.Tensor, seed: tf.Tensor, wire: Wire) -> tf.Tensor:
        """Returns the packed code of a tensor as `wire.packed`; any floating dtype and shape, at least one element."""
        size = tensor.shape.num_elements()
        packing = self.packing(size, wire)
        vector = tf.reshape(tensor, [-1])  # outside of the function, which is shared by all shapes of a size
        return packing.to_wire(self._function(self._encode, size, packing)(vector, seed))

    def sum(self, packed: tf.Tensor, replicas: int, size: int, wire: Wire) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the sum [size] float32 of several replicas' vectors, and their checks [replicas] float32.

        Args:
          packed: packed codes of the replicas, concatenated.
          replicas: number of replicas.
          size: length of the vectors.
          wire: as for `encode`.
        """
        packing = self.packing(size, wire)
        return self._function(self._sum, size, packing)(packing.views(packed, replicas))

    def decode(self, packed: tf.Tensor, size: int, wire: Wire) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the vector [size] float32 of one replica's packed code, and its check [1] float32."""
        packing = self.packing(size, wire)
        return self._function(self._decode, size, packing)(packing.views(packed, 1))

    def _encode(self, size: int, packing: Packing, vector: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        x = tf.cast(vector, tf.float32)
        code = self._codec.encode(x, seed)
        check = self._function(self._check, size, compiles=True)(x, code)
        return packing.join([*code, tf.reshape(check, [1])])

    def _check(self, size: int, x: tf.Tensor, code: list[tf.Tensor]) -> tf.Tensor:
        return self._codec.check(x, code)

    def _sum(self, size: int, packing: Packing, views: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        *codes, checks = packing.take(views)
        return self._codec.sum(codes, size), tf.reshape(checks, [-1])

    def _decode(self, size: int, packing: Packing, views: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        *code, check = [part[0] for part in packing.take(views)]
        return self._codec.decode(code, size), check

    def _function(
        self, method: Callable[..., Any], size: int, *static: Any, compiles: bool | None = None
    ) -> Callable[..., Any]:
        key = (method.__name__, size, *static)
        if key not in self._functions:
            function = functools.partial(method, size, *static)
            is_compiled = self._codec.compiles if compiles is None else compiles
            self._functions[key] = (
                tf.function(function, jit_compile=True, autograph=False)
                if is_compiled and size >= _MIN_COMPILED_SIZE
                else function
            )
        return self._functions[key]
