"""Sends activations and their gradients between stages, optionally compressed."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.collectives import Collectives, SupportedDtypes
from tfdist.collectives.interface import tensor_bytes
from tfdist.gradients.compression.methods.quantization import Int8
from tfdist.gradients.compression.reducers import CodecCompiler

MIN_ELEMENTS = 1024  # compressing smaller tensors would save nothing


class ActivationCompression:
    """Compresses floating-point tensors of at least `MIN_ELEMENTS` elements; this base class compresses nothing.

    The receiver computes with decoded values, the sender with the original ones. Gradients pass straight through the
    compression, and are themselves compressed. Encoding a decoded tensor adds no error, so all stages that a skip connection
    crosses have equal values. Non-finite tensors stay non-finite, so the step is skipped, or ends the run, as without
    compression. Rounding is to nearest and deterministic.
    """

    def encode(self, tensor: tf.Tensor, dtypes: SupportedDtypes) -> tf.Tensor:
        """Returns the message for a tensor of static shape."""
        return tensor

    def decode(self, message: tf.Tensor, spec: tf.TensorSpec, dtypes: SupportedDtypes) -> tf.Tensor:
        """Returns a tensor of this shape and dtype from a result of `encode` of the other process."""
        return message

    def message_spec(self, spec: tf.TensorSpec, dtypes: SupportedDtypes) -> tf.TensorSpec:
        """Returns the shape and dtype of the result of `encode` for a tensor of this shape and dtype."""
        return spec


def _is_large(tensor: tf.Tensor | tf.TensorSpec) -> bool:
    return bool(tensor.dtype.is_floating) and tensor.shape.num_elements() >= MIN_ELEMENTS


class CastActivations(ActivationCompression):
    """Casts tensors whose elements are larger than 2 bytes to the 2-byte `dtype`.

    |C(x)_i - x_i| <= 2^-8 |x_i| in bfloat16, and 2^-11 |x_i| in float16 for |x_i| in [2^-14, 65504]. Larger values become
    inf in float16, as in `tfdist.gradients`.
    """

    def __init__(self, dtype: tf.DType):
        self._dtype = dtype

    def encode(self, tensor: tf.Tensor, dtypes: SupportedDtypes) -> tf.Tensor:
        return tf.cast(tensor, self.message_spec(tensor, dtypes).dtype)

    def decode(self, message: tf.Tensor, spec: tf.TensorSpec, dtypes: SupportedDtypes) -> tf.Tensor:
        return tf.cast(message, spec.dtype)

    def message_spec(self, spec: tf.TensorSpec, dtypes: SupportedDtypes) -> tf.TensorSpec:
        is_cast = _is_large(spec) and spec.dtype.size > self._dtype.size
        return tf.TensorSpec(spec.shape, self._dtype if is_cast else spec.dtype)


class QuantizedActivations(ActivationCompression):
    """Rounds each element to one of 255 levels, with a scale for each block of 256 consecutive elements.

        C(x)_i = s round(127 x_i / s) / 127,   |C(x)_i - x_i| <= s / 254,   s = max |x| of the block, in float32

    Cost: 1.016 bytes per element, and 4 per tensor. ActNN (Chen et al., arXiv:2104.14129) uses scales per group for
    activations that are stored; Bian et al., Does Compressing Activations Help Model Parallel Training?, 2023
    (arXiv:2301.02654), compare quantization with other methods between stages; Wang et al., Fine-tuning Language Models
    over Slow Networks using Activation Compression with Guarantees, 2022 (arXiv:2206.01299), show where direct
    quantization, such as this, limits accuracy: at 2 to 4 bits.
    """

    def __init__(self) -> None:
        self._coder = CodecCompiler(Int8())

    def encode(self, tensor: tf.Tensor, dtypes: SupportedDtypes) -> tf.Tensor:
        return self._coder.encode(tensor, tf.zeros([2], tf.int32), dtypes) if _is_large(tensor) else tensor

    def decode(self, message: tf.Tensor, spec: tf.TensorSpec, dtypes: SupportedDtypes) -> tf.Tensor:
        if not _is_large(spec):
            return message
        vector, _ = self._coder.sum(message, 1, spec.shape.num_elements(), dtypes)
        return tf.cast(tf.reshape(vector, spec.shape), spec.dtype)

    def message_spec(self, spec: tf.TensorSpec, dtypes: SupportedDtypes) -> tf.TensorSpec:
        if not _is_large(spec):
            return spec
        size = self._coder.packing(spec.shape.num_elements(), dtypes).bytes
        return tf.TensorSpec([size // dtypes.packed.size], dtypes.packed)


EXACT = ActivationCompression()
METHODS: Mapping[str, Callable[[], ActivationCompression]] = {
    "none": lambda: EXACT,
    "bf16": lambda: CastActivations(tf.bfloat16),
    "fp16": lambda: CastActivations(tf.float16),
    "int8": QuantizedActivations,
}


_SENDABLE_DTYPES = {2: tf.float16, 4: tf.int32, 8: tf.int64}  # by element size in bytes; every engine supports them


class Link(NamedTuple):
    """The connection of this process to another stage of its pipeline."""

    collectives: Collectives  # of the pipeline's processes, whose ranks are their stages
    peer: int  # rank of the other process
    compression: ActivationCompression = EXACT  # both processes must use the same

    def send(self, tensors: Sequence[tf.Tensor], tag: str) -> None:
        """Sends tensors of static shapes; does nothing if there are none."""
        if tensors:
            dtypes = self.collectives.dtypes
            messages = [self.compression.encode(tensor, dtypes) for tensor in tensors]
            payloads = [_reinterpret(message, _sendable_dtype(message.dtype, dtypes)) for message in messages]
            self.collectives.send(payloads, self.peer, tag=tag)

    def receive(self, specs: Sequence[tf.TensorSpec], tag: str) -> list[tf.Tensor]:
        """Returns the tensors that the other process sends with this tag, of static shapes."""
        if not specs:
            return []
        dtypes = self.collectives.dtypes
        message_specs = [self.compression.message_spec(spec, dtypes) for spec in specs]
        payloads = self.collectives.receive(
            [_sendable_spec(spec, dtypes) for spec in message_specs], self.peer, tag=tag
        )
        messages = [_reinterpret(tensor, spec.dtype) for tensor, spec in zip(payloads, message_specs, strict=True)]
        return [self.compression.decode(message, spec, dtypes) for message, spec in zip(messages, specs, strict=True)]


def message_bytes(spec: tf.TensorSpec, compression: ActivationCompression, dtypes: SupportedDtypes) -> int:
    """Returns the size of the message for a tensor of static shape, in bytes."""
    return tensor_bytes(_sendable_spec(compression.message_spec(spec, dtypes), dtypes))


def _sendable_spec(spec: tf.TensorSpec, dtypes: SupportedDtypes) -> tf.TensorSpec:
    return tf.TensorSpec(spec.shape, _sendable_dtype(spec.dtype, dtypes))


def _sendable_dtype(dtype: tf.DType, dtypes: SupportedDtypes) -> tf.DType:
    return dtype if dtype in dtypes.sendable else _SENDABLE_DTYPES.get(dtype.size, tf.int32)


def _reinterpret(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Bitcasts a tensor to a dtype of the same size; casts booleans and small integers."""
    if tensor.dtype == dtype:
        return tensor
    return tf.bitcast(tensor, dtype) if tensor.dtype.size == dtype.size else tf.cast(tensor, dtype)
