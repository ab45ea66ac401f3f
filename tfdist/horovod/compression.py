"""Compression of gradients: Horovod's two compressors, and every method of tfdist."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.errors import InputError, nearest
from tfdist.gradients import Bucketed, Reducer, ReductionResult
from tfdist.gradients.compression import METHODS, create_reducer
from tfdist.gradients.compression import check as check_compression
from tfdist.gradients.reducer import Tensors


class Compressor(abc.ABC):
    """Horovod's interface of compressors: converts a tensor to a dtype that the engine can sum, and back."""

    @staticmethod
    @abc.abstractmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the tensor to send, and the context for `decompress`."""

    @staticmethod
    @abc.abstractmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Converts a sum of compressed tensors back."""


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor


class FP16Compressor(Compressor):
    """Sends and sums floats as float16, at half the bytes; sums above 65504 become inf."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tf.cast(tensor, ctx)


@dataclasses.dataclass(frozen=True)
class Method:
    """A compression method of tfdist, as in `--compression`; call it to add parameters.

    For example, `hvd.Compression.powersgd(rank=4)` is the method "powersgd(rank=4)". Methods have state, so they work with
    `DistributedOptimizer` and `DistributedGradientTape`, but not in single operations.
    """

    text: str  # a method, or rules for variables; validated on use

    def __call__(self, **parameters: Any) -> "Method":
        """Returns the same method with these parameters."""
        return Method(f"{self.text}({', '.join(f'{name}={value!r}' for name, value in parameters.items())})")

    def __repr__(self) -> str:
        return f"hvd.Compression({self.text!r})"


class _CompressionMeta(type):
    def __getattr__(cls, name: str) -> Method:
        if name not in METHODS:
            raise AttributeError(f"hvd.Compression has no method {name}.{nearest(name, ('none', 'fp16', *METHODS))}")
        return Method(name)

    def __dir__(cls) -> list[str]:
        return sorted({*super().__dir__(), *METHODS})

    def __call__(cls, text: str) -> Method:
        """Returns the method of any value of `--compression`, as in `Compression("topk(ratio=0.01)|fp16")`."""
        return Method(text)


class Compression(metaclass=_CompressionMeta):
    """Compression of gradients: `none`, `fp16` (Horovod's), and tfdist's methods by name, e.g. `.powersgd(rank=4)`."""

    none = NoneCompressor
    fp16 = FP16Compressor


def to_compressor(compression: Any) -> type[Compressor]:
    """Returns the compressor of a single operation; raises `InputError` for a method that only supports gradients."""
    if isinstance(compression, str | Method):
        name = compression if isinstance(compression, str) else compression.text
        raise InputError(
            f"A single operation takes Compression.none or .fp16. Received: {name}. Pass it to "
            "hvd.DistributedOptimizer or hvd.DistributedGradientTape, which keep its state."
        )
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise InputError(
            f"compression must be a class with compress and decompress, or a method. Received: {compression!r}. "
            "Pass hvd.Compression.none."
        )
    return compression


def validate_compression(compression: Any) -> Any:
    """Validates a compression of gradients; converts a string to a `Method`, and raises `InputError` for unknown methods."""
    if isinstance(compression, str):
        compression = Method(compression)
    if isinstance(compression, Method):
        check_compression(compression.text)
        return compression
    return to_compressor(compression)


def reducer_of(compression: Any, specs: Sequence[tf.TensorSpec]) -> Reducer:
    """Returns the reducer of dense gradients, which sums them in buckets with a `Method` or a Horovod compressor."""
    if isinstance(compression, Method):
        return create_reducer(specs, compression.text)
    return Bucketed(CompressedSum(to_compressor(compression)))


def is_lossless(compression: Any) -> bool:
    """Returns whether a compression has no state and its sums preserve inf and NaN."""
    return not isinstance(compression, Method)


class CompressedSum(Reducer):
    """Compresses tensors with a Horovod compressor, and sums them with the engine."""

    def __init__(self, compressor: type[Compressor]):
        self._compressor = compressor

    def reduce(self, tensors: Tensors, state: Tensors, collectives: Collectives, *, name: str) -> ReductionResult:
        pairs = [self._compressor.compress(tensor) for tensor in tensors]
        sums = collectives.all_reduce([tensor for tensor, _ in pairs], name=name)
        totals = [self._compressor.decompress(s, context) for s, (_, context) in zip(sums, pairs, strict=True)]
        return ReductionResult(totals, list(tensors), [], totals)
