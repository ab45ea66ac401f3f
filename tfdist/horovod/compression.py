"""`Compression`: Horovod's two compressors, and every method of tfdist."""

import abc
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.errors import InputError
from tfdist.gradients import Bucketed, Reduced, Reducer
from tfdist.gradients.compression import METHODS, check, compressed
from tfdist.grammar.spec import nearest


class Compressor(abc.ABC):
    """Horovod's interface: what is sent in a tensor's place, in a dtype that the engine sums."""

    @staticmethod
    @abc.abstractmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """The tensor to send, and what `decompress` needs."""

    @staticmethod
    @abc.abstractmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """The tensor that the sum of what was sent stands for."""


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """See base class."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """See base class."""
        return tensor


class FP16Compressor(Compressor):
    """Sends and sums floats as float16: half of the bytes; a sum above 65504 is inf."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """See base class."""
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """See base class."""
        return tf.cast(tensor, ctx)


class Method:
    """A method of tfdist for the sums of gradients, as `--compression` names it; called, it gets parameters.

    `hvd.Compression.powersgd(rank=4)` is "powersgd(rank=4)". Methods keep errors and draw numbers from step to step, so
    they go to `DistributedOptimizer` and `DistributedGradientTape`, not to single operations.
    """

    def __init__(self, text: str):
        """Args: text: a method, or rules for each variable; checked where it is used."""
        self.text = text

    def __call__(self, **parameters: Any) -> "Method":
        """The same method with these parameters."""
        return Method(f"{self.text}({', '.join(f'{name}={value!r}' for name, value in parameters.items())})")

    def __repr__(self) -> str:
        """As it was written."""
        return f"hvd.Compression({self.text!r})"


class _Methods(type):
    """Makes an attribute of each method of tfdist's catalogue."""

    def __getattr__(cls, name: str) -> Method:
        if name not in METHODS:
            raise AttributeError(f"hvd.Compression has no method {name}.{nearest(name, ('none', 'fp16', *METHODS))}")
        return Method(name)

    def __dir__(cls) -> list[str]:
        return sorted({*super().__dir__(), *METHODS})

    def __call__(cls, text: str) -> Method:
        """`Compression("topk(ratio=0.01)|fp16")`: any text that `--compression` takes."""
        return Method(text)


class Compression(metaclass=_Methods):
    """What gradients are sent as: `none`, `fp16` (Horovod's own), and tfdist's methods by name, `.powersgd(rank=4)`."""

    none = NoneCompressor
    fp16 = FP16Compressor


def wire_compressor(compression: Any) -> type[Compressor]:
    """The compressor of a single operation; raises `InputError` for what only gradients are compressed by."""
    if isinstance(compression, str | Method):
        name = compression if isinstance(compression, str) else compression.text
        raise InputError(
            f"A single operation takes Compression.none or .fp16. Received: {name}. Give it to hvd.DistributedOptimizer or "
            "hvd.DistributedGradientTape, which keep its state."
        )
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise InputError(
            f"compression must have compress and decompress, or name a method. Received: {compression!r}. "
            "Pass hvd.Compression.none."
        )
    return compression


def known_compression(compression: Any) -> Any:
    """A compression of gradients, with a method's text as a `Method`; raises `InputError` if it is none."""
    if isinstance(compression, str):
        compression = Method(compression)
    if isinstance(compression, Method):
        check(compression.text)
        return compression
    return wire_compressor(compression)


def reducer_of(compression: Any, specs: Sequence[tf.TensorSpec]) -> Reducer:
    """The reducer that sums dense gradients so, in tfdist's buckets.

    Args:
      compression: a `Method`, or a class with Horovod's `compress` and `decompress`.
      specs: names, shapes and dtypes of the gradients.
    """
    if isinstance(compression, Method):
        return compressed(specs, compression.text)
    return Bucketed(CompressedSum(wire_compressor(compression)))


def is_lossless(compression: Any) -> bool:
    """Whether sums show an inf or a NaN of any summand by themselves, and no state is kept."""
    return not isinstance(compression, Method)


class CompressedSum(Reducer):
    """The engine's sum of what a compressor of Horovod's kind sends."""

    def __init__(self, compressor: type[Compressor]):
        """Args: compressor: has `compress` and `decompress`."""
        self._compressor = compressor

    def reduce(
        self, tensors: Sequence[tf.Tensor], state: Sequence[tf.Tensor], collectives: Collectives, *, name: str
    ) -> Reduced:
        """See base class."""
        pairs = [self._compressor.compress(tensor) for tensor in tensors]
        sums = collectives.all_reduce([tensor for tensor, _ in pairs], name=name)
        totals = [self._compressor.decompress(s, context) for s, (_, context) in zip(sums, pairs, strict=True)]
        return Reduced(totals, list(tensors), [], totals)
