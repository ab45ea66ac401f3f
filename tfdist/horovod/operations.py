"""Implements Horovod's functions on tensors: collectives with gradients, barriers, and ranks and sizes as tensors.

**Gradients.** Operations have the same gradients as in Horovod, because scripts rely on them, although they belong to
different losses: with L the sum of the ranks' losses over N ranks, all-reduce and all-to-all return dL/dx, all-gather and
broadcast dL/dx / N (the gradient of the mean loss), and reduce-scatter N dL/dx.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import tensorflow as tf

from tfdist.collectives.interface import CARRIERS
from tfdist.collectives.no_constant_folding import runtime_zero
from tfdist.errors import InputError
from tfdist.horovod.compression import Compression, to_compressor
from tfdist.horovod.engine import CallId, Factors, call_of, scale_tensor, to_supported_dtype
from tfdist.horovod.errors import FailedPreconditionError, InvalidArgumentError, NotSupportedError
from tfdist.horovod.ops import (
    Adasum,
    Average,
    Product,
    ReduceOp,
    Sum,
    check_num_rank_power_of_2,
    handle_average_backwards_compatibility,
    to_reduce_op,
)
from tfdist.horovod.process import engine
from tfdist.horovod.process_sets import global_process_set

_Function = TypeVar("_Function", bound=Callable[..., Any])
_ARGUMENT_NAMES = {"value": "tensor"}


def with_alternative_signature(
    order: Sequence[str], is_alternative: Callable[..., bool] | None = None
) -> Callable[[_Function], _Function]:
    """Returns a decorator of a function that adds an alternative signature.

    `order` is its list of argument names, in which `value` stands for `tensor`. `is_alternative` returns whether positional
    arguments match it; None if the order is the same.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if len(args) <= len(order) and is_alternative is not None and is_alternative(*args):
                arguments = dict(zip(order, args, strict=False))
                for name in arguments.keys() & kwargs.keys():
                    raise TypeError(f"{function.__name__}() got multiple values for argument {name!r}")
                args, kwargs = (), arguments | kwargs
            if "value" in kwargs and args:
                raise TypeError(f"{function.__name__}() got multiple values for argument 'value'")
            return function(*args, **{_ARGUMENT_NAMES.get(name, name): value for name, value in kwargs.items()})

        return cast(_Function, wrapper)

    return decorate


def adasum(rank_tensors: Sequence[tf.Tensor], operation: str) -> tf.Tensor:
    """Combines the ranks' tensors pairwise in a binary tree, like Horovod.

    adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b, with the products in float64: a + b if they are
    orthogonal, and a if they are equal. The tensors have the same shape and floating dtype.

    Raises:
      NotSupportedError: the number of ranks is not a power of two.
      InputError: the dtype is not floating.
    """
    dtype = rank_tensors[0].dtype
    if not check_num_rank_power_of_2(len(rank_tensors)):
        raise NotSupportedError(
            f"op=hvd.Adasum takes 2, 4, 8 ... ranks. Received: {operation} of {len(rank_tensors)}. Use op=hvd.Average."
        )
    if not dtype.is_floating:
        raise InputError(f"op=hvd.Adasum takes floats. Received: {operation} of {dtype.name}. Use op=hvd.Average.")
    tensors = [tf.cast(tensor, tf.float64) for tensor in rank_tensors]
    while len(tensors) > 1:
        tensors = [_combine(a, b) for a, b in zip(tensors[::2], tensors[1::2], strict=True)]
    return tf.cast(tensors[0], dtype)


def _combine(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    dot_product = tf.reduce_sum(a * b)
    factors = [1.0 - tf.math.divide_no_nan(dot_product, 2.0 * tf.reduce_sum(x * x)) for x in (a, b)]
    return factors[0] * a + factors[1] * b


def reduce_linearly(
    tensors: Sequence[tf.Tensor], op: ReduceOp, call: CallId, factors: Factors = (1.0, 1.0)
) -> list[tf.Tensor]:
    """Reduces tensors by an operation that also reduces the gradients: Sum, Average or, as in Horovod, Adasum."""

    @tf.custom_gradient
    def differentiable(*xs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        totals = reduce_through_engine(xs, op, call, factors)
        return totals, lambda *upstream: reduce_linearly(upstream, op, call.with_suffix("gradient"), factors)

    return tf.nest.flatten(differentiable(*tensors))


def reduce_through_engine(
    tensors: Sequence[tf.Tensor], op: ReduceOp, call: CallId, factors: Factors = (1.0, 1.0)
) -> list[tf.Tensor]:
    """Reduces tensors of any dtype through the engine; not differentiable. bfloat16 is summed in float32.

    Adasum gathers all tensors, n (N - 1) bytes received for n sent, because Horovod supports it only with MPI and on GPUs.

    Raises:
      InvalidArgumentError: the engine cannot reduce a dtype.
    """
    current_engine, operation = engine(), f"{op.name} {call.name}"
    if op == Adasum:
        size = call.process_set.size()
        rows = [scale_tensor(tf.stop_gradient(tensor), factors[0])[None] for tensor in tensors]
        stacks = _gather(rows, call, operation)
        return [scale_tensor(adasum(tf.unstack(stack, size), operation), factors[1]) for stack in stacks]
    inputs = []
    for tensor in tensors:
        dtype = tensor.dtype if tensor.dtype in current_engine.reducible_dtypes else CARRIERS.get(tensor.dtype)
        if dtype not in current_engine.reducible_dtypes or tensor.dtype == tf.bool:
            names = ", ".join(sorted(dtype.name for dtype in current_engine.reducible_dtypes | {tf.bfloat16}))
            raise InvalidArgumentError(
                f"{operation} takes {names}. Received: {tensor.dtype.name}. Cast it to one of these."
            )
        inputs.append(tf.cast(tf.stop_gradient(tensor), dtype))
    totals = current_engine.reduce(inputs, op, call, factors)
    return [tf.cast(total, tensor.dtype) for total, tensor in zip(totals, tensors, strict=True)]


def _gather(tensors: Sequence[tf.Tensor], call: CallId, operation: str) -> list[tf.Tensor]:
    inputs = [to_supported_dtype(engine(), tensor, operation) for tensor in tensors]
    results = zip(engine().gather(inputs, call), tensors, strict=True)
    return [tf.cast(result, tensor.dtype) for result, tensor in results]


@with_alternative_signature(("value", "name"))
def allgather(  # noqa: D417 - for the other arguments of the functions in this file, see `allreduce`
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = global_process_set
) -> tf.Tensor:
    """Concatenates the tensors of all ranks along the first dim, in the order of ranks; differentiable.

    Cost: n (N - 1) bytes received for n sent.

    Args:
      tensor: tensor of rank 1 or more and any dtype except string; the first dim may differ between ranks, and be 0. For the
        other arguments, see `allreduce`.
    """
    call = call_of("allgather", name, process_set, ignore_name_scope)
    return gather_tensors([_check_rows(tensor, "allgather")], call)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> list[tf.Tensor]:
    """Gathers several tensors like `allgather`, in one collective per dtype; returns them in order."""
    if not tensors:
        return []
    call = call_of("grouped_allgather", name, process_set, ignore_name_scope)
    return gather_tensors([_check_rows(tensor, "grouped_allgather") for tensor in tensors], call)


def gather_tensors(tensors: Sequence[tf.Tensor], call: CallId) -> list[tf.Tensor]:
    """Gathers tensors of any dtype through the engine; differentiable."""

    @tf.custom_gradient
    def differentiable(*xs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            means = reduce_linearly(upstream, Average, call.with_suffix("gradient"))
            local_counts = tf.stack([tf.shape(x)[0] for x in xs])[None]
            [counts] = engine().gather([local_counts], call.with_suffix("rows"))
            starts = tf.reduce_sum(counts[: call.process_set.rank()], axis=0)
            return [mean[starts[i] : starts[i] + local_counts[0, i]] for i, mean in enumerate(means)]

        return _gather([tf.stop_gradient(x) for x in xs], call, f"allgather {call.name}"), gradient

    return tf.nest.flatten(differentiable(*tensors))


@with_alternative_signature(("value", "root_rank", "name"))
def broadcast(  # noqa: D417
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> tf.Tensor:
    """Returns the tensor of one rank on every rank; differentiable.

    Args:
      tensor: tensor of the same shape and dtype on every rank; any dtype except string.
      root_rank: a rank of the job, in `process_set`. For the other arguments, see `allreduce`.

    Raises:
      InputError: `root_rank` is not in `process_set`, or the dtype is not supported.
    """
    current_engine, call = engine(), call_of("broadcast", name, process_set, ignore_name_scope)
    if root_rank not in process_set.ranks:
        raise InvalidArgumentError(
            f"root_rank must be one of the ranks {process_set.ranks}. Received: {root_rank}. Pass another root_rank."
        )

    @tf.custom_gradient
    def differentiable(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            [mean] = reduce_linearly([upstream], Average, call.with_suffix("gradient"))
            if current_engine.rank == root_rank:
                return mean
            # Zero, but depends on the mean: the graph must not prune the all-reduce, for which the root waits.
            return tf.where(tf.equal(runtime_zero(), 0), tf.zeros_like(mean), mean)

        message = to_supported_dtype(current_engine, tf.stop_gradient(x), f"broadcast {call.name}")
        return tf.cast(current_engine.broadcast(message, root_rank, call), x.dtype), gradient

    return differentiable(tf.convert_to_tensor(tensor))


def alltoall(  # noqa: D417
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Sends a part of the rows to each rank, and returns the received parts, in the order of senders; differentiable.

    Cost: n (N - 1) / N bytes sent; without Horovod all tensors are gathered, n (N - 1) received.

    Args:
      tensor: tensor of rank 1 or more and any dtype except string; the first dim may differ between ranks.
      splits: [N] integers, the number of rows for each rank; None for equal parts. For the other arguments, see `allreduce`.

    Returns:
      The received rows; with `splits`, also the number of rows from each rank.
    """
    x = _check_rows(tensor, "alltoall")
    call = call_of("alltoall", name, process_set, ignore_name_scope)
    if splits is not None:
        return exchange_rows(x, tf.cast(splits, tf.int32), call)
    size = process_set.size()
    assertion = tf.debugging.assert_equal(
        tf.shape(x)[0] % size, 0, f"alltoall {call.name}: without splits the rows must be divisible by {size} ranks"
    )
    with tf.control_dependencies([] if assertion is None else [assertion]):
        parts = tf.fill([size], tf.shape(x)[0] // size)
    return exchange_rows(x, parts, call)[0]


def exchange_rows(tensor: tf.Tensor, splits: tf.Tensor, call: CallId) -> tuple[tf.Tensor, tf.Tensor]:
    """Exchanges rows of any dtype through the engine's all-to-all; differentiable."""

    @tf.custom_gradient
    def differentiable(x: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable[..., tf.Tensor]]:
        message = to_supported_dtype(engine(), tf.stop_gradient(x), f"alltoall {call.name}")
        rows, row_counts = engine().exchange(message, splits, call)

        def gradient(upstream: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            return exchange_rows(upstream, row_counts, call.with_suffix("gradient"))[0]

        return (tf.cast(rows, x.dtype), row_counts), gradient

    return differentiable(tensor)


def _is_keras_reducescatter(tensor: Any = None, name: Any = "", *arguments: Any) -> bool:
    """Detects `reducescatter(value, name, op)`; the default signature has a device and a compression."""
    if name is None or (arguments and isinstance(arguments[0], int)):
        return True
    is_device = not name or str(name).startswith("/") or str(name).partition(":")[0].lower() in ("cpu", "gpu")
    return isinstance(name, str) and not is_device


@with_alternative_signature(("value", "name", "op"), _is_keras_reducescatter)
def reducescatter(  # noqa: D417
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduces a tensor over the ranks and returns this rank's rows of it; differentiable.

    If N does not divide the number of rows, the first ranks get one more row. Composed of an all-to-all and a local sum in
    the order of ranks (16-bit floats are summed in float32), because Horovod's reduce-scatter makes all later all-reduces
    many times slower under Gloo. Cost: n (N - 1) / N bytes sent, after a small message that compares shape and operation.

    Args:
      tensor: tensor of rank 1 or more, of the same shape and dtype on every rank.
      op: Average or Sum. For the other arguments, see `allreduce`.
      prescale_factor: factor of each rank's tensor before the reduction, in its own dtype.
      postscale_factor: factor of the result.

    Raises:
      InputError: the tensor is a scalar, or the operation is not supported.
      tf.errors.FailedPreconditionError: on every rank, if the ranks' shapes, dtypes, operations or factors differ.
    """
    if (reduce_op := to_reduce_op(op)) not in (Average, Sum):
        raise InputError(
            f"reducescatter takes op=Average or Sum. Received: {reduce_op.name}. Use allreduce, and slice its result."
        )
    compressor = to_compressor(compression)
    call = call_of("reducescatter", name, process_set, ignore_name_scope)
    with tf.device(device_dense or None):
        message, context = compressor.compress(_check_rows(tensor, "reducescatter"))
        result = _reduce_scatter(message, reduce_op, (prescale_factor, postscale_factor), call)
        return compressor.decompress(result, context)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """Reduces and scatters several tensors, each like `reducescatter`."""
    factors: dict[str, Any] = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}
    return [reducescatter(x, device_dense, compression, op, process_set=process_set, **factors) for x in tensors]


def _reduce_scatter(tensor: tf.Tensor, op: ReduceOp, factors: Factors, call: CallId) -> tf.Tensor:
    """Returns this rank's rows of the reduced tensor; its gradient is all-gathered and scaled."""
    size, rank = call.process_set.size(), call.process_set.rank()
    prescale, postscale = factors
    gradient_factor = prescale * postscale * (1 if op == Average else size)
    postscale = postscale / size if op == Average else postscale

    @tf.custom_gradient
    def differentiable(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        row_count = _agree_on_row_count(tf.stop_gradient(x), op, factors, call)
        rows, remainder = row_count // size, row_count % size
        splits = rows + tf.cast(tf.range(size) < remainder, tf.int32)
        parts, _ = exchange_rows(scale_tensor(tf.stop_gradient(x), prescale), splits, call)
        by_sender = tf.reshape(parts, tf.concat([[size], splits[rank : rank + 1], tf.shape(x)[1:]], 0))
        sum_dtype = tf.float32 if x.dtype in (tf.float16, tf.bfloat16) else x.dtype
        total = tf.cast(scale_tensor(tf.reduce_sum(tf.cast(by_sender, sum_dtype), axis=0), postscale), x.dtype)
        total = tf.ensure_shape(total, tf.TensorShape([None]).concatenate(x.shape[1:]))

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return gather_tensors([scale_tensor(upstream, gradient_factor)], call.with_suffix("gradient"))[0]

        return total, gradient

    return differentiable(tensor)


def _agree_on_row_count(tensor: tf.Tensor, op: ReduceOp, factors: Factors, call: CallId) -> tf.Tensor:
    """Returns the number of rows, after checking that all ranks have the same shape, dtype, operation and factors.

    These are encoded in the shape of an empty tensor, which the engine compares in a gather, raising
    `tf.errors.FailedPreconditionError` on every rank if they differ. No data is sent.
    """
    factors_hash = zlib.crc32(repr(tuple(map(float, factors))).encode()) % _HASH_MODULUS
    row_shape = tf.concat([[1 + int(op), 1 + factors_hash], tf.shape(tensor)], 0)
    empty_tensor = tf.zeros(tf.concat([runtime_zero()[None], row_shape], 0), tensor.dtype)
    try:
        [result] = gather_tensors([empty_tensor], call.with_suffix("agree"))
    except tf.errors.FailedPreconditionError as error:
        raise FailedPreconditionError(
            f"reducescatter {call.name}: every rank must have the same shape, dtype, operation and factors. Received: "
            f"{list(tensor.shape)} of {tensor.dtype.name}, {op.name}, {factors[0]:g} and {factors[1]:g} "
            f"on this rank ({' '.join(str(error).split())}). Make the same call on every rank."
        ) from error
    return tf.shape(tensor)[0] + tf.shape(result)[0]  # adding 0 keeps the gather from being pruned


# The hash of the factors is a dim of a row, whose number of elements must stay far below 2 ^ 63.
_HASH_MODULUS = 1021


def _check_rows(tensor: Any, operation: str) -> tf.Tensor:
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank == 0:
        error = FailedPreconditionError if operation.endswith("allgather") else InvalidArgumentError
        raise error(f"{operation} takes a tensor of rows. Received: a scalar. Pass tf.reshape(x, [1]).")
    return tensor


def _is_keras_allreduce(tensor: Any = None, name: Any = None, *arguments: Any) -> bool:
    """Detects `allreduce(value, name, average, ...)`: `average` is not a string, unlike `device_dense` in its position."""
    return isinstance(name, str) or (name is None and bool(arguments) and not isinstance(arguments[0], str))


@with_alternative_signature(
    ("value", "name", "average", "prescale_factor", "postscale_factor", "op", "compression"), _is_keras_allreduce
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
      op: Average (the default), Sum, Min, Max, Product or Adasum; slices support only the first two.
      prescale_factor: factor of the tensor before the reduction.
      postscale_factor: factor of the result.
      name: name of the call, the same on every rank; by default, calls are numbered in the order of tracing.
      process_set: the ranks that make the call.
      ignore_name_scope: whether the name omits TensorFlow's name scopes.

    Raises:
      InputError: an argument is invalid, or not supported by the engine.
      NotImplementedError: not supported for slices, or for Adasum with this number of ranks; also an `InputError`.
    """
    call = call_of("allreduce", name, process_set, ignore_name_scope)
    reduce_op, factors = handle_average_backwards_compatibility(op, average), (prescale_factor, postscale_factor)
    return _allreduce([tensor], reduce_op, factors, (device_dense, device_sparse), compression, call)[0]


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
) -> list[Any]:
    """Reduces several tensors like `allreduce`, in one collective per dtype; returns them in order."""
    call = call_of("grouped_allreduce", name, process_set, ignore_name_scope)
    reduce_op, factors = handle_average_backwards_compatibility(op, average), (prescale_factor, postscale_factor)
    return _allreduce(tensors, reduce_op, factors, (device_dense, device_sparse), compression, call)


def _allreduce(
    tensors: Sequence[Any],
    op: ReduceOp,
    factors: Factors,
    devices: tuple[str, str],
    compression: Any,
    call: CallId,
) -> list[Any]:
    compressor, results = to_compressor(compression), list(tensors)
    sparse_indices = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    dense_indices = [i for i in range(len(tensors)) if i not in sparse_indices]
    if sparse_indices:
        if op not in (Average, Sum) or factors != (1.0, 1.0):
            raise NotSupportedError(
                f"tf.IndexedSlices take op=Average or Sum and no factors. Received: op={op.name}, {factors[0]}, "
                f"{factors[1]}. Convert them with tf.convert_to_tensor (sparse_as_dense=True)."
            )
        with tf.device(devices[1] or None):
            slices = _gather_slices([tensors[i] for i in sparse_indices], op, call)
        for i, rows in zip(sparse_indices, slices, strict=True):
            results[i] = rows
    if dense_indices:
        with tf.device(devices[0] or None):
            pairs = [compressor.compress(tf.convert_to_tensor(tensors[i])) for i in dense_indices]
            totals = _reduce([message for message, _ in pairs], op, call, factors)
            for i, total, (_, context) in zip(dense_indices, totals, pairs, strict=True):
                results[i] = compressor.decompress(total, context)
    return results


def _reduce(tensors: Sequence[tf.Tensor], op: ReduceOp, call: CallId, factors: Factors) -> list[tf.Tensor]:
    if op in (Sum, Average, Adasum):
        return reduce_linearly(tensors, op, call, factors)
    inputs = [scale_tensor(tensor, factors[0]) for tensor in tensors]
    return [scale_tensor(total, factors[1]) for total in _reduce_nonlinearly(inputs, op, call)]


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

    return tf.nest.flatten(differentiable(*tensors))


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
