"""Reducers that send separate messages for each tensor, such as the codes of a codec.

Codes are sent as packed bytes. XLA compiles encoding and decoding where that is faster.
"""

import dataclasses
import functools
import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist.collectives import Collectives, SupportedDtypes
from tfdist.collectives.interface import tensor_bytes
from tfdist.distribution.strategy import State
from tfdist.gradients.compression.codec import Codec
from tfdist.gradients.compression.random_draws import fold_in
from tfdist.gradients.reducer import Reducer, ReductionResult, Tensors, split_at

_UNSIGNED = {1: tf.uint8, 2: tf.uint16, 4: tf.uint32, 8: tf.uint64}


@dataclasses.dataclass(frozen=True)
class Packing:
    """The layout of the parts of a code in one vector.

    Parts are ordered by element size, the largest first, and zeros pad the vector to a multiple of the largest. Each part
    is therefore aligned in a view of all bytes as its dtype. `join` and `take` copy, and should be compiled together with
    the code that produces and consumes the parts; `to_payload` and `views` only reinterpret bytes as another dtype.
    """

    specs: tuple[tf.TensorSpec, ...]  # shapes and dtypes of the parts
    dtypes: SupportedDtypes  # dtypes of the engine

    @property
    def bytes(self) -> int:
        """The packed length in bytes."""
        alignment = max(self.dtypes.packed.size, *(spec.dtype.size for spec in self.specs))
        return -(-self._content_bytes // alignment) * alignment

    def join(self, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the bytes of the parts as a vector of the unsigned dtype of the smallest element size."""
        unit = _UNSIGNED[min(spec.dtype.size for spec in self.specs)]
        vectors = [_bitcast_vector(tf.reshape(parts[i], [-1]), unit) for i in self._order]
        padding = (self.bytes - self._content_bytes) // unit.size
        return tf.concat([*vectors, tf.zeros([padding], unit)] if padding else vectors, axis=0)

    def to_payload(self, code: tf.Tensor) -> tf.Tensor:
        """Returns the result of `join` as a vector of `dtypes.packed`."""
        return _bitcast_vector(code, self.dtypes.packed)

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
        self._packings: dict[tuple[int, SupportedDtypes], Packing] = {}
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def packing(self, size: int, dtypes: SupportedDtypes) -> Packing:
        """Returns the packing of a vector's code, followed by its check."""
        if (size, dtypes) not in self._packings:
            vector, seed = tf.TensorSpec([size], tf.float32), tf.TensorSpec([2], tf.int32)
            encode = tf.function(self._codec.encode, autograph=False).get_concrete_function(vector, seed)
            specs = [tf.TensorSpec(part.shape, part.dtype) for part in encode.structured_outputs]
            self._packings[size, dtypes] = Packing((*specs, _CHECK), dtypes)
        return self._packings[size, dtypes]

    def encode(self, tensor: tf.Tensor, seed: tf.Tensor, dtypes: SupportedDtypes) -> tf.Tensor:
        """Returns the packed code of a tensor as `dtypes.packed`; any floating dtype and shape, at least one element."""
        size = tensor.shape.num_elements()
        packing = self.packing(size, dtypes)
        vector = tf.reshape(tensor, [-1])  # outside of the function, which is shared by all shapes of a size
        return packing.to_payload(self._function(self._encode, size, packing)(vector, seed))

    def sum(self, packed: tf.Tensor, replicas: int, size: int, dtypes: SupportedDtypes) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the sum [size] float32 of the vectors of replicas, and their checks [replicas] float32.

        `packed` are the packed codes of the replicas, concatenated.
        """
        packing = self.packing(size, dtypes)
        return self._function(self._sum, size, packing)(packing.views(packed, replicas))

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

    def _function(
        self, method: Callable[..., Any], size: int, *static: Any, compiles: bool | None = None
    ) -> Callable[..., Any]:
        key = (method.__name__, size, *static)
        if key not in self._functions:
            function = functools.partial(method, size, *static)
            is_compiled = (self._codec.compiles if compiles is None else compiles) and size >= _MIN_COMPILED_SIZE
            self._functions[key] = tf.function(function, jit_compile=True, autograph=False) if is_compiled else function
        return self._functions[key]


def reshape_like(vector: tf.Tensor, tensor: tf.Tensor) -> tf.Tensor:
    """Returns a vector in the shape and dtype of a tensor."""
    return tf.cast(tf.reshape(vector, tensor.shape), tensor.dtype)


def seed_of(name: str, draws: Any, rank: Any) -> tf.Tensor:
    """Returns a seed [2] int32 for stateless random operations, from a message name, a count of draws and a rank."""
    key = zlib.crc32(name.encode()) & 0x7FFFFFFF
    return fold_in(fold_in(tf.constant([key, key ^ 0x5BD1E995], tf.int32), draws), rank)


def finiteness_flag(x: tf.Tensor) -> tf.Tensor:
    """Returns a scalar float32 for a witness: 0 if x is finite, else NaN, so sums of flags never overflow."""
    return tf.where(tf.reduce_all(tf.math.is_finite(x)), 0.0, float("nan"))


VectorSum: TypeAlias = tuple[tf.Tensor, tf.Tensor, tf.Tensor]  # the total, the sent vector and the witness


class Vectorwise(Reducer):
    """Reduces each tensor of a list with separate messages. Empty tensors are not sent and keep their state.

    A subclass defines `sum_vector`, or `vector_state` and `reduce_vector` if it has a state of its own.

    Attributes:
      randomized: whether each call draws different random numbers.
      has_equal_draws: whether the random numbers are equal on all replicas.
    """

    randomized: bool = False
    has_equal_draws: bool = True

    def state(self, specs: Sequence[tf.TensorSpec]) -> list[State]:
        return [state for spec in specs for state in self.vector_state(spec)]

    def reduce(self, tensors: Tensors, state: Tensors, collectives: Collectives, *, name: str) -> ReductionResult:
        result = ReductionResult([], [], [], [])
        remaining, count = list(state), len(state) // max(1, len(tensors))
        for i, tensor in enumerate(tensors):
            tensor_state, remaining = split_at(remaining, count)
            reduction = ReductionResult([tensor], [tensor], tensor_state, [])
            if tensor.shape.num_elements():
                x = tf.reshape(tf.cast(tensor, tf.float32), [-1])
                [total], [sent], *others = self.reduce_vector(x, tensor_state, collectives, name=f"{name}/{i}")
                reduction = ReductionResult([reshape_like(total, tensor)], [reshape_like(sent, tensor)], *others)
            for values, new_values in zip(result, reduction, strict=True):
                values += new_values
        return result

    def vector_state(self, spec: tf.TensorSpec) -> list[State]:
        """Returns the state for one tensor, by default the number of previous draws if the reducer is randomized.

        Every tensor must have the same number of states.
        """
        return [State(f"{spec.name}/draws", (), tf.int32, per_replica=False)] if self.randomized else []

    def reduce_vector(self, x: tf.Tensor, state: Tensors, collectives: Collectives, *, name: str) -> ReductionResult:
        """Sums a vector [n] float32, n static and at least 1, over replicas, as `reduce` does.

        The state is in the order of `vector_state`; `totals` and `sent` are [n] float32.
        """
        rank = 0 if self.has_equal_draws else collectives.rank
        seed = seed_of(name, state[0], rank) if state else tf.zeros([2], tf.int32)
        total, sent, witness = self.sum_vector(x, seed, collectives, name=name)
        return ReductionResult([total], [sent], [draws + 1 for draws in state], [witness])

    def sum_vector(self, x: tf.Tensor, seed: tf.Tensor, collectives: Collectives, *, name: str) -> VectorSum:
        """Sums a vector over replicas, given a seed, [2] int32; returns the total, the sent vector and the witness."""
        raise NotImplementedError


# TensorFlow slices without a copy at multiples of this many float32 elements.
_ALIGNMENT = 16


class CodecReducer(Vectorwise):
    """Sums vectors by sending each replica's code to all others: for a code of c bytes, each receives c (N - 1) bytes.

    The code is sent in one message with 4 more bytes, a float that is finite if and only if the vector is.

    If sums may be encoded again, a reduce-scatter is used where it sends less: for more than 2 replicas, with a native
    all-to-all. Each replica sums one part of the vector and encodes the sum for the others, which sends 2 c (N - 1) / N,
    like a ring all-reduce. The second coding error is attributed to the replica that encoded the sum, so error feedback
    loses nothing.

    Attributes:
      coder: packs and decodes the codes.
    """

    has_equal_draws = False

    def __init__(self, codec: Codec):
        self._codec = codec
        self.coder = CodecCompiler(codec)
        self.biased, self.randomized = codec.biased, codec.randomized
        self.experimental = codec.experimental

    def sum_vector(self, x: tf.Tensor, seed: tf.Tensor, collectives: Collectives, *, name: str) -> VectorSum:
        size, dtypes = x.shape[0], collectives.dtypes
        if self._codec.recodes and collectives.size > 2 and dtypes.native_all_to_all:
            return self._reduce_scatter(x, seed, collectives, name)
        packed = self.coder.encode(x, seed, dtypes)
        [codes] = collectives.all_gather([packed], name=name)
        total, checks = self.coder.sum(codes, collectives.size, size, dtypes)
        return total, self.coder.sum(packed, 1, size, dtypes)[0], checks

    def _reduce_scatter(self, x: tf.Tensor, seed: tf.Tensor, collectives: Collectives, name: str) -> VectorSum:
        size, replicas, dtypes, coder = x.shape[0], collectives.size, collectives.dtypes, self.coder
        part_size = -(-size // (replicas * _ALIGNMENT)) * _ALIGNMENT
        parts = tf.reshape(tf.pad(x, [[0, replicas * part_size - size]]), [replicas, part_size])
        packed = [coder.encode(parts[rank], fold_in(seed, rank), dtypes) for rank in range(replicas)]
        [rank_codes] = collectives.all_to_all([tf.concat(packed, axis=0)], name=f"{name}/shares")
        total, checks = coder.sum(rank_codes, replicas, part_size, dtypes)
        # NaN if a replica's vector is not finite, so the check of the second encoding fails as well.
        total *= tf.where(tf.reduce_all(tf.math.is_finite(checks)), 1.0, float("nan"))
        total_code = coder.encode(total, fold_in(seed, replicas), dtypes)
        [total_codes] = collectives.all_gather([total_code], name=f"{name}/sums")
        sums = tf.reshape(total_codes, [replicas, -1])
        totals, checks = zip(*(coder.sum(sums[rank], 1, part_size, dtypes) for rank in range(replicas)), strict=True)
        second_error = coder.sum(total_code, 1, part_size, dtypes)[0] - total
        owner = tf.one_hot(collectives.rank, replicas, dtype=tf.float32)
        sent = [
            coder.sum(packed[rank], 1, part_size, dtypes)[0] + owner[rank] * second_error for rank in range(replicas)
        ]
        return tf.concat(totals, axis=0)[:size], tf.concat(sent, axis=0)[:size], tf.concat(checks, axis=0)
