"""Converts dtypes that an engine does not support: to one with the same bits if possible, else to a wider one."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.horovod.engine import Engine
from tfdist.horovod.errors import InvalidArgumentError

_SAME_BITS = {tf.bfloat16: tf.int16, tf.uint32: tf.int32, tf.uint64: tf.int64}
_WIDER = {
    tf.bfloat16: tf.float32,
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
}


def reduced_as(
    engine: Engine, tensors: Sequence[tf.Tensor], reduce: Callable[[list[tf.Tensor]], list[tf.Tensor]], what: str
) -> list[tf.Tensor]:
    """Reduces tensors in a dtype that the engine can reduce; bfloat16 is summed in float32 and rounded once.

    Args:
      engine: engine with the supported dtypes.
      tensors: tensors to reduce.
      reduce: reduces tensors of supported dtypes.
      what: name of the operation, for errors.

    Raises:
      InvalidArgumentError: no dtype is suitable.
    """
    sent = []
    for tensor in tensors:
        wider = tensor.dtype if tensor.dtype in engine.reduces else _WIDER.get(tensor.dtype)
        if wider not in engine.reduces or tensor.dtype == tf.bool:
            known = ", ".join(sorted(dtype.name for dtype in engine.reduces | {tf.bfloat16}))
            raise InvalidArgumentError(f"{what} takes {known}. Received: {tensor.dtype.name}. Cast it to one of these.")
        sent.append(tf.cast(tensor, wider))
    return [tf.cast(total, tensor.dtype) for total, tensor in zip(reduce(sent), tensors, strict=True)]


def moved_as(
    engine: Engine, tensors: Sequence[tf.Tensor], move: Callable[[list[tf.Tensor]], list[tf.Tensor]], what: str
) -> list[tf.Tensor]:
    """Moves tensors in a dtype that the engine can move, without loss.

    Args:
      engine: engine with the supported dtypes.
      tensors: tensors to move.
      move: moves tensors of supported dtypes.
      what: name of the operation, for errors.

    Raises:
      InvalidArgumentError: no dtype is suitable.
    """
    ways = [_way(engine, tensor.dtype, what) for tensor in tensors]
    sent = [convert(tensor, dtype) for tensor, (convert, dtype) in zip(tensors, ways, strict=True)]
    received = move(sent)
    return [convert(result, tensor.dtype) for result, tensor, (convert, _) in zip(received, tensors, ways, strict=True)]


def _way(engine: Engine, dtype: tf.DType, what: str) -> tuple[Callable[..., tf.Tensor], tf.DType]:
    if dtype in engine.moves:
        return tf.cast, dtype
    if _SAME_BITS.get(dtype) in engine.moves:
        return tf.bitcast, _SAME_BITS[dtype]
    if _WIDER.get(dtype) in engine.moves:
        return tf.cast, _WIDER[dtype]
    raise InvalidArgumentError(
        f"{what} needs a tensor of a supported dtype. Received: {dtype.name}. Cast it to another dtype."
    )
