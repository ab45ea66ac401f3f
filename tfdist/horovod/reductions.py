"""All-reduce, including gradients, barriers, and ranks and sizes as tensors: Horovod's functions."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.horovod.compression import Compression, wire_compressor
from tfdist.horovod.data_movement import (
    as_list,
    gather_tensors,
    reduce_linearly,
    reduce_through_engine,
    with_alternative_signature,
)
from tfdist.horovod.engine import CallId, call_of, scale_tensor
from tfdist.horovod.errors import NotSupportedError
from tfdist.horovod.ops import Adasum, Average, Product, ReduceOp, Sum, handle_average_backwards_compatibility
from tfdist.horovod.process import engine
from tfdist.horovod.process_sets import global_process_set


def _uses_keras_signature(tensor: Any = None, name: Any = None, *arguments: Any) -> bool:
    """Detects `allreduce(value, name, average, ...)`: `average` is not a string, unlike `device_dense` in its position."""
    return isinstance(name, str) or (name is None and bool(arguments) and not isinstance(arguments[0], str))


@with_alternative_signature(
    ("value", "name", "average", "prescale_factor", "postscale_factor", "op", "compression"), _uses_keras_signature
)
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
) -> tf.Tensor | tf.IndexedSlices:
    """Reduces a tensor elementwise over the ranks; differentiable.

    `tf.IndexedSlices` are gathered: the concatenated rows of all ranks represent the sum. The gradient belongs to the
    sum of the ranks' losses. Cost: 2 n (N - 1) / N bytes sent for n; slices n (N - 1).

    Args:
      tensor: tensor of the same shape and dtype on every rank: float16, bfloat16, float32, float64 or an integer dtype. In
        the signature of `horovod.tensorflow.keras`, it is called `value`, and is followed by `name`.
      average: deprecated; use `op`.
      device_dense: device on which dense tensors are reduced.
      device_sparse: device on which slices are gathered.
      compression: `Compression.none`, `.fp16` or a class with Horovod's `compress` and `decompress`.
      op: Average (the default), Sum, Min, Max, Product or Adasum; only the first two for slices.
      prescale_factor: factor of the tensor before the reduction.
      postscale_factor: factor of the result.
      name: name of the call, the same on every rank; by default, calls are numbered in the order of tracing.
      process_set: the ranks that make the call.
      ignore_name_scope: whether the name omits TensorFlow's name scopes.

    Raises:
      InputError: an argument is invalid, or not supported by the engine.
      NotImplementedError: not supported for slices, or for Adasum with this number of ranks; also an `InputError`.
    """
    [result] = grouped_allreduce(
        [tensor],
        average,
        device_dense,
        device_sparse,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        ignore_name_scope,
        name,
        _operation="allreduce",
    )
    return result


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
    _operation: str = "grouped_allreduce",
) -> list[Any]:
    """Reduces several tensors like `allreduce`, in one message per dtype; returns them in order."""
    reduce_op = handle_average_backwards_compatibility(op, average)
    compressor = wire_compressor(compression)
    results = list(tensors)
    sparse_indices = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    dense_indices = [i for i in range(len(tensors)) if i not in sparse_indices]
    call = call_of(_operation, name, process_set, ignore_name_scope)
    if sparse_indices:
        if reduce_op not in (Average, Sum) or (prescale_factor, postscale_factor) != (1.0, 1.0):
            raise NotSupportedError(
                f"tf.IndexedSlices take op=Average or Sum and no factors. Received: op={reduce_op.name}, {prescale_factor}, "
                f"{postscale_factor}. Convert them with tf.convert_to_tensor (sparse_as_dense=True)."
            )
        with tf.device(device_sparse or None):
            for i, rows in zip(
                sparse_indices, _gather_slices([tensors[i] for i in sparse_indices], reduce_op, call), strict=True
            ):
                results[i] = rows
    if dense_indices:
        with tf.device(device_dense or None):
            pairs = [compressor.compress(tf.convert_to_tensor(tensors[i])) for i in dense_indices]
            messages = [message for message, _ in pairs]
            totals = _reduce(messages, reduce_op, call, prescale_factor, postscale_factor)
            for i, total, (_, context) in zip(dense_indices, totals, pairs, strict=True):
                results[i] = compressor.decompress(total, context)
    return results


def _reduce(
    tensors: Sequence[tf.Tensor], op: ReduceOp, call: CallId, prescale: float, postscale: float
) -> list[tf.Tensor]:
    if op in (Sum, Average, Adasum):
        return reduce_linearly(tensors, op, call, prescale, postscale)
    inputs = [scale_tensor(tensor, prescale) for tensor in tensors]
    return [scale_tensor(total, postscale) for total in _reduce_nonlinearly(inputs, op, call)]


def _reduce_nonlinearly(tensors: Sequence[tf.Tensor], op: ReduceOp, call: CallId) -> list[tf.Tensor]:
    """Returns products, minimums or maximums; ranks with equal extremes share the gradient."""

    @tf.custom_gradient
    def differentiable(*xs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        totals = reduce_through_engine(xs, op, call)

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            gradients = reduce_linearly(upstream, Sum, call.with_suffix("gradient"))
            if op == Product:
                return [tf.math.divide_no_nan(g * y, x) for g, y, x in zip(gradients, totals, xs, strict=True)]
            masks = [tf.cast(tf.equal(x, y), x.dtype) for x, y in zip(xs, totals, strict=True)]
            counts = reduce_through_engine(masks, Sum, call.with_suffix("ties"))
            return [g * mask / count for g, mask, count in zip(gradients, masks, counts, strict=True)]

        return totals, gradient

    return as_list(differentiable(*tensors))


def _gather_slices(slices: Sequence[tf.IndexedSlices], op: ReduceOp, call: CallId) -> list[tf.IndexedSlices]:
    """Returns the rows of all ranks; for a mean, divided by the number of ranks, which converts integers to float64."""
    values = gather_tensors([s.values for s in slices], call.with_suffix("values"))
    indices = gather_tensors([s.indices for s in slices], call.with_suffix("indices"))
    if op == Average:
        count = engine().count(call.process_set)
        values = [rows / tf.cast(count, rows.dtype) for rows in values]
    return [
        tf.IndexedSlices(rows, row_indices, s.dense_shape)
        for rows, row_indices, s in zip(values, indices, slices, strict=True)
    ]


def barrier(process_set: Any = global_process_set) -> tf.Tensor:
    """Returns a zero that is available once every rank has made the call; in a graph, it must be used."""
    [total] = reduce_through_engine([tf.zeros([1])], Sum, call_of("barrier", None, process_set))
    return total[0]


def join() -> tf.Tensor:
    """Signals that this rank is out of data, waits for the other ranks, and returns the last rank that joined.

    The other ranks' all-reduces continue without this rank. Gathers do not, nor do operations that use them: sparse
    gradients, compression and reduce-scatter.
    """
    return engine().join()


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks in a process set, as a scalar int32."""
    return engine().query("size", process_set_id)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Returns whether this rank is in a process set: a scalar int32, 1 or 0, or Horovod's negative error code."""
    return engine().query("process_set_included", process_set_id)


def rank_op(name: str | None = None) -> tf.Tensor:
    """Returns this rank, as a scalar int32."""
    return engine().query("rank")


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Returns the number of ranks on this host, as a scalar int32."""
    return engine().query("local_size")


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Returns this rank's index among the ranks on its host, as a scalar int32."""
    return engine().query("local_rank")
