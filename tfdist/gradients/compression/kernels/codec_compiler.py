"""Encodes tensors to packed bytes and back with a codec, compiled by XLA where that is faster."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.collectives import Wire
from tfdist.gradients.compression.codec import Codec
from tfdist.gradients.compression.kernels.byte_packing import Packing

_CHECK = tf.TensorSpec([1], tf.float32)
# With fewer elements, compilation takes longer than it saves in a typical run.
_COMPILED_FROM = 16 * 1024


class CodecCompiler:
    """Packs the codes of tensors, each with the 4 bytes of its `Codec.check`, and decodes packed codes.

    XLA can compile any part without communication, also inside a larger function. One function is created per size of
    tensor and cached; those for small tensors are not compiled.
    """

    def __init__(self, codec: Codec):
        """Initializes the compiler.

        Args:
          codec: encodes and decodes the vectors.
        """
        self._codec = codec
        self._packings: dict[tuple[int, Wire], Packing] = {}
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def packing(self, size: int, wire: Wire) -> Packing:
        """Returns how a vector's code and, after it, its check are packed."""
        if (size, wire) not in self._packings:
            vector, seed = tf.TensorSpec([size], tf.float32), tf.TensorSpec([2], tf.int32)
            traced = tf.function(self._codec.encode, autograph=False).get_concrete_function(vector, seed)
            specs = [tf.TensorSpec(part.shape, part.dtype) for part in traced.structured_outputs]
            self._packings[size, wire] = Packing((*specs, _CHECK), wire)
        return self._packings[size, wire]

    def encode(self, tensor: tf.Tensor, seed: tf.Tensor, wire: Wire) -> tf.Tensor:
        """Returns the packed code of a tensor as `wire.packed`; any floating dtype and shape, at least one element."""
        size = tensor.shape.num_elements()
        packing = self.packing(size, wire)
        vector = tf.reshape(tensor, [-1])  # outside of the function, which is shared by all shapes of a size
        return packing.on_wire(self._function(self._encode, size, packing)(vector, seed))

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
        self, work: Callable[..., Any], size: int, *static: Any, compiles: bool | None = None
    ) -> Callable[..., Any]:
        key = (work.__name__, size, *static)
        if key not in self._functions:
            made = functools.partial(work, size, *static)
            wanted = self._codec.compiles if compiles is None else compiles
            self._functions[key] = (
                tf.function(made, jit_compile=True, autograph=False) if wanted and size >= _COMPILED_FROM else made
            )
        return self._functions[key]
