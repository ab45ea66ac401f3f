"""All-gather, broadcast, all-to-all and reduce-scatter: Horovod's functions, including gradients.

**Gradients.** Horovod's registered gradients are preserved, because scripts rely on them, although they are not all
gradients of the same loss: with L the sum of the ranks' losses, all-reduce and all-to-all give dL/dx; all-gather and
broadcast dL/dx divided by the number N of ranks (that of the mean loss); reduce-scatter N dL/dx.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import tensorflow as tf

from tfdist.collectives.no_constant_folding import zero_when_run
from tfdist.errors import InputError
from tfdist.horovod.compression import Compression, wire_compressor
from tfdist.horovod.engine import CallId, call_of, move_in_supported_dtype, reduce_in_supported_dtype, scaled
from tfdist.horovod.errors import FailedPreconditionError, InvalidArgumentError, NotSupportedError
from tfdist.horovod.ops import Adasum, Average, ReduceOp, Sum, check_num_rank_power_of_2, known_op
from tfdist.horovod.process import engine
from tfdist.horovod.process_sets import global_process_set

_Function = TypeVar("_Function", bound=Callable[..., Any])
_RENAMED = {"value": "tensor"}


def with_alternative_signature(
    order: Sequence[str], when: Callable[..., bool] | None = None
) -> Callable[[_Function], _Function]:
    """Decorates a function so that it can also be called in its other form.

    Args:
      order: names of the other form's arguments, by position; `value` stands for `tensor`.
      when: whether positional arguments are in the other form; None if both forms have the same order.
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if len(args) <= len(order) and when is not None and when(*args):
                arguments = dict(zip(order, args, strict=False))
                for name in arguments.keys() & kwargs.keys():
                    raise TypeError(f"{function.__name__}() got multiple values for argument {name!r}")
                args, kwargs = (), arguments | kwargs
            if "value" in kwargs and args:
                raise TypeError(f"{function.__name__}() got multiple values for argument 'value'")
            return function(*args, **{_RENAMED.get(name, name): value for name, value in kwargs.items()})

        return cast(_Function, wrapper)

    return decorate


def is_device_name(text: str) -> bool:
    """Returns whether a text is a device, such as "", "/cpu:0" or "GPU:1", rather than the name of a call."""
    return text == "" or text.startswith("/") or text.partition(":")[0].lower() in ("cpu", "gpu")


def adasum(gathered: Sequence[tf.Tensor], what: str) -> tf.Tensor:
    """Combines the ranks' tensors in pairs of neighbors, then pairs of pairs, like Horovod.

    adasum(a, b) = (1 - a.b / (2 a.a)) a + (1 - a.b / (2 b.b)) b, with the products in float64: a + b if they are
    orthogonal, and a if they are equal.

    Args:
      gathered: one tensor per rank, all of the same shape and floating dtype.
      what: name of the call, for errors.

    Raises:
      NotSupportedError: the number of ranks is not a power of two.
      InputError: the dtype is not floating.
    """
    if not check_num_rank_power_of_2(len(gathered)):
        raise NotSupportedError(
            f"op=hvd.Adasum takes 2, 4, 8 ... ranks. Received: {what} of {len(gathered)}. Use op=hvd.Average."
        )
    if not gathered[0].dtype.is_floating:
        raise InputError(
            f"op=hvd.Adasum takes floats. Received: {what} of {gathered[0].dtype.name}. Use op=hvd.Average."
        )
    tensors = [tf.cast(tensor, tf.float64) for tensor in gathered]
    while len(tensors) > 1:
        tensors = [_combine(a, b) for a, b in zip(tensors[::2], tensors[1::2], strict=True)]
    return tf.cast(tensors[0], gathered[0].dtype)


def _combine(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    common = tf.reduce_sum(a * b)

    def share(x: tf.Tensor) -> tf.Tensor:
        return 1.0 - tf.math.divide_no_nan(common, 2.0 * tf.reduce_sum(x * x))

    return share(a) * a + share(b) * b


def reduce_linearly(
    tensors: Sequence[tf.Tensor], op: ReduceOp, call: CallId, prescale: float = 1.0, postscale: float = 1.0
) -> list[tf.Tensor]:
    """Reduces tensors by an operation that is its own gradient: Sum, Average and, as defined by Horovod, Adasum."""

    @tf.custom_gradient
    def differentiable(*xs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        totals = reduce_through_engine(xs, op, call, prescale, postscale)
        return totals, lambda *upstream: reduce_linearly(upstream, op, call.then("gradient"), prescale, postscale)

    return as_list(differentiable(*tensors))


def reduce_through_engine(
    tensors: Sequence[tf.Tensor], op: ReduceOp, call: CallId, prescale: float = 1.0, postscale: float = 1.0
) -> list[tf.Tensor]:
    """Reduces tensors of any dtype through the engine; not differentiable.

    Adasum is composed of a gather, n (N - 1) bytes received for n sent: Horovod supports it only with MPI and on GPUs.
    """
    current, inputs = engine(), [tf.stop_gradient(tensor) for tensor in tensors]
    if op == Adasum:
        size, what = call.process_set.size(), f"{op.name} {call.name}"
        sent = [scaled(tensor, prescale)[None] for tensor in inputs]
        gathered = move_in_supported_dtype(current, sent, lambda rows: current.gather(rows, call), what)
        return [scaled(adasum(tf.unstack(tensors_of_ranks, size), what), postscale) for tensors_of_ranks in gathered]
    return reduce_in_supported_dtype(
        current, inputs, lambda sent: current.reduce(sent, op, call, prescale, postscale), f"{op.name} {call.name}"
    )


def as_list(results: Any) -> list[tf.Tensor]:
    """Returns the results of a function with a custom gradient as a list; a single result is a tensor."""
    return list(results) if isinstance(results, list | tuple) else [results]


@with_alternative_signature(("value", "name"))
def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = global_process_set
) -> tf.Tensor:
    """Concatenates the tensors of all ranks along the first dim, in the order of ranks; differentiable.

    Cost: n (N - 1) bytes received for n sent.

    Args:
      tensor: tensor of rank 1 or more and any dtype but string; equal on every rank except for the first dim, which may
        be 0.
      name: name of the call; see `allreduce`.
      ignore_name_scope: see `allreduce`.
      process_set: the ranks that make the call.
    """
    call = call_of("allgather", name, process_set, ignore_name_scope)
    return gather_tensors([_check_rows(tensor, "allgather")], call)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> list[tf.Tensor]:
    """Gathers several tensors like `allgather`, in one message per dtype; returns them in order."""
    if not tensors:
        return []
    call = call_of("grouped_allgather", name, process_set, ignore_name_scope)
    return gather_tensors([_check_rows(tensor, "grouped_allgather") for tensor in tensors], call)


def gather_tensors(tensors: Sequence[tf.Tensor], call: CallId) -> list[tf.Tensor]:
    """Gathers tensors of any dtype through the engine; differentiable."""
    current = engine()

    @tf.custom_gradient
    def differentiable(*xs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        inputs = [tf.stop_gradient(x) for x in xs]
        results = move_in_supported_dtype(
            current, inputs, lambda sent: current.gather(sent, call), f"allgather {call.name}"
        )

        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
            means = reduce_linearly(upstream, Average, call.then("gradient"))
            own_rows = tf.stack([tf.shape(x)[0] for x in xs])[None]
            [rows] = current.gather([own_rows], call.then("rows"))
            rank = call.process_set.rank()
            starts = tf.reduce_sum(rows[:rank], axis=0)
            return [mean[starts[i] : starts[i] + own_rows[0, i]] for i, mean in enumerate(means)]

        return results, gradient

    return as_list(differentiable(*tensors))


@with_alternative_signature(("value", "root_rank", "name"))
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> tf.Tensor:
    """Returns the tensor of one rank on every rank; differentiable.

    Args:
      tensor: tensor of the same shape and dtype on every rank; any dtype but string.
      root_rank: a rank of the job that is in `process_set`.
      name: name of the call; see `allreduce`.
      ignore_name_scope: see `allreduce`.
      process_set: the ranks that make the call.

    Returns:
      Tensor of the shape and dtype of `tensor`.

    Raises:
      InputError: `root_rank` is not in `process_set`, or the dtype is not supported.
    """
    current, call = engine(), call_of("broadcast", name, process_set, ignore_name_scope)
    if root_rank not in process_set.ranks:
        raise InvalidArgumentError(
            f"root_rank must be one of the ranks {process_set.ranks}. Received: {root_rank}. Pass another root_rank."
        )

    @tf.custom_gradient
    def differentiable(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def move(sent: list[tf.Tensor]) -> list[tf.Tensor]:
            return [current.broadcast(sent[0], root_rank, call)]

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            [mean] = reduce_linearly([upstream], Average, call.then("gradient"))
            if current.rank == root_rank:
                return mean
            # Zero, but computed from the mean, which must not be pruned from the graph: the root waits for it.
            return tf.where(tf.equal(zero_when_run(), 0), tf.zeros_like(mean), mean)

        [received] = move_in_supported_dtype(current, [tf.stop_gradient(x)], move, f"broadcast {call.name}")
        return received, gradient

    return differentiable(tf.convert_to_tensor(tensor))


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Sends a part of the first dim to each rank; returns the parts received, in the order of senders; differentiable.

    Cost: n (N - 1) / N bytes sent; without Horovod all tensors are gathered, n (N - 1) received.

    Args:
      tensor: tensor of rank 1 or more and any dtype but string; equal on every rank except for the first dim.
      splits: [N] integers, number of rows for each rank; None for equal parts.
      name: name of the call; see `allreduce`.
      ignore_name_scope: see `allreduce`.
      process_set: the ranks that make the call.

    Returns:
      The rows received; with splits, also the number of rows from each rank.
    """
    x = _check_rows(tensor, "alltoall")
    call = call_of("alltoall", name, process_set, ignore_name_scope)
    if splits is not None:
        return exchange_rows(x, tf.cast(splits, tf.int32), call)
    size = process_set.size()
    divisible = tf.debugging.assert_equal(
        tf.shape(x)[0] % size, 0, f"alltoall {call.name}: without splits the rows must be divisible by {size} ranks"
    )
    with tf.control_dependencies([] if divisible is None else [divisible]):
        parts = tf.fill([size], tf.shape(x)[0] // size)
    return exchange_rows(x, parts, call)[0]


def exchange_rows(tensor: tf.Tensor, splits: tf.Tensor, call: CallId) -> tuple[tf.Tensor, tf.Tensor]:
    """Exchanges rows of any dtype through the engine's all-to-all; differentiable."""
    current = engine()

    @tf.custom_gradient
    def differentiable(x: tf.Tensor) -> tuple[tuple[tf.Tensor, tf.Tensor], Callable[..., tf.Tensor]]:
        counts: list[tf.Tensor] = []

        def move(sent: list[tf.Tensor]) -> list[tf.Tensor]:
            rows, received_counts = current.exchange(sent[0], splits, call)
            counts.append(received_counts)
            return [rows]

        [received] = move_in_supported_dtype(current, [tf.stop_gradient(x)], move, f"alltoall {call.name}")
        [received_counts] = counts

        def gradient(upstream: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            return exchange_rows(upstream, received_counts, call.then("gradient"))[0]

        return (received, received_counts), gradient

    return differentiable(tensor)


def _uses_keras_signature(tensor: Any = None, name: Any = "", *more: Any) -> bool:
    """Detects `reducescatter(value, name, op)`; the other signature has a device and a compression."""
    if more and isinstance(more[0], int):
        return True
    return name is None or (isinstance(name, str) and not is_device_name(name))


@with_alternative_signature(("value", "name", "op"), _uses_keras_signature)
def reducescatter(
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

    If the number of rows is not divisible, the first ranks get one more. Composed of an all-to-all and a local sum in
    the order of ranks (16-bit floats are summed in float32), because Horovod's own makes every later all-reduce many
    times slower under Gloo. Cost: n (N - 1) / N bytes sent, and before that a small message that compares shape and
    operation.

    Args:
      tensor: tensor of rank 1 or more, of the same shape and dtype on every rank.
      device_dense: device on which to run.
      compression: see `allreduce`.
      op: Average or Sum.
      name: name of the call; see `allreduce`.
      process_set: the ranks that make the call.
      ignore_name_scope: see `allreduce`.
      prescale_factor: factor of each rank's tensor before the reduction, in its own dtype.
      postscale_factor: factor of the result.

    Raises:
      InputError: the tensor is a scalar, or the operation is not supported.
      tf.errors.FailedPreconditionError: on every rank, if the ranks' shapes, dtypes, operations or factors differ.
    """
    if known_op(op) not in (Average, Sum):
        raise InputError(
            f"reducescatter takes op=Average or Sum. Received: {known_op(op).name}. Use allreduce and take the rows."
        )
    compressor = wire_compressor(compression)
    call = call_of("reducescatter", name, process_set, ignore_name_scope)
    with tf.device(device_dense or None):
        sent, context = compressor.compress(_check_rows(tensor, "reducescatter"))
        factors = Factors(ReduceOp(op), prescale_factor, postscale_factor)
        return compressor.decompress(_reduce_scatter(sent, factors, call), context)


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
    return [
        reducescatter(
            tensor,
            device_dense,
            compression,
            op,
            process_set=process_set,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        for tensor in tensors
    ]


class Factors(NamedTuple):
    """The operation of a reduce-scatter, Average or Sum, and the factors before and after it."""

    op: ReduceOp
    before: float
    after: float


def _reduce_scatter(tensor: tf.Tensor, factors: Factors, call: CallId) -> tf.Tensor:
    """Returns this rank's rows of the reduced tensor; its gradient is all-gathered and scaled."""
    size, rank = call.process_set.size(), call.process_set.rank()
    after, gradient_factor = factors.after, factors.before * factors.after
    after, gradient_factor = (
        (after / size, gradient_factor) if factors.op == Average else (after, gradient_factor * size)
    )

    @tf.custom_gradient
    def differentiable(x: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        row_count = _agreed_rows(tf.stop_gradient(x), factors, call)
        rows, remainder = row_count // size, row_count % size
        splits = rows + tf.cast(tf.range(size) < remainder, tf.int32)
        received, _ = exchange_rows(scaled(tf.stop_gradient(x), factors.before), splits, call)
        by_sender = tf.reshape(received, tf.concat([[size], splits[rank : rank + 1], tf.shape(x)[1:]], 0))
        exact = tf.float32 if x.dtype in (tf.float16, tf.bfloat16) else x.dtype
        total = tf.cast(scaled(tf.reduce_sum(tf.cast(by_sender, exact), axis=0), after), x.dtype)
        total = tf.ensure_shape(total, tf.TensorShape([None]).concatenate(x.shape[1:]))

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            return gather_tensors([scaled(upstream, gradient_factor)], call.then("gradient"))[0]

        return total, gradient

    return differentiable(tensor)


def _agreed_rows(tensor: tf.Tensor, factors: Factors, call: CallId) -> tf.Tensor:
    """Returns the number of rows; checks that all ranks have the same shape, dtype, operation and factors.

    They are encoded in the shape of a gather without rows, which the engine compares: it raises
    `tf.errors.FailedPreconditionError` on every rank if they differ. No data is sent.
    """
    factors_hash = zlib.crc32(repr((float(factors.before), float(factors.after))).encode()) % _HASHES
    row = tf.concat([[1 + int(factors.op), 1 + factors_hash], tf.shape(tensor)], 0)
    empty = tf.zeros(tf.concat([zero_when_run()[None], row], 0), tensor.dtype)
    try:
        [gathered] = gather_tensors([empty], call.then("agree"))
    except tf.errors.FailedPreconditionError as error:
        raise FailedPreconditionError(
            f"reducescatter {call.name}: every rank must have the same shape, dtype, operation and factors. Received: "
            f"{list(tensor.shape)} of {tensor.dtype.name}, {factors.op.name}, {factors.before:g} and {factors.after:g} on "
            f"this rank ({' '.join(str(error).split())}). Make the same call on every rank."
        ) from error
    return tf.shape(tensor)[0] + tf.shape(gathered)[0]  # 0, but must not be pruned


# The hash of factors is a dim of the rows, the product of whose dims must stay far below 2 ^ 63.
_HASHES = 1021


def _check_rows(tensor: Any, what: str) -> tf.Tensor:
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank == 0:
        kind = FailedPreconditionError if what.endswith("allgather") else InvalidArgumentError
        raise kind(f"{what} takes a tensor of rows. Received: a scalar. Pass tf.reshape(x, [1]).")
    return tensor
