"""The contract `Engine`: the ranks, their operations and dtypes, names of calls, and the comparison of calls between ranks."""

import abc
import dataclasses
import itertools
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.coordination import Group
from tfdist.errors import InputError, PeerLostError
from tfdist.horovod.errors import FailedPreconditionError, InvalidArgumentError, check_no_old_graph
from tfdist.horovod.ops import ReduceOp


@dataclasses.dataclass(frozen=True)
class CallId:
    """Identifies one call of an operation; the same on every rank.

    Attributes:
      name: used to match the ranks' calls by engines that match messages by name.
      process_set: the ranks that make the call.
      explicit: whether the name was given by the user, in which case it is also used for eager calls.
      ignore_name_scope: whether TensorFlow's name scopes are left out of the name.
    """

    name: str
    process_set: Any
    explicit: bool = False
    ignore_name_scope: bool = False

    def then(self, suffix: str) -> "CallId":
        """Returns another call that belongs to this one."""
        return dataclasses.replace(self, name=f"{self.name}_{suffix}")


class Engine(abc.ABC):
    """The operations that `tfdist.horovod` needs from an engine.

    The operations take and return tensors on this rank. Gradients do not flow through them; `tfdist.horovod.reductions`
    and `tfdist.horovod.data_movement` add gradients. A list of several tensors is sent together.

    Attributes:
      rank: index of this process, below `size`.
      size: number of processes.
      local_rank: index of this process among the `local_size` processes of its host.
      local_size: number of processes on this host.
      cross_rank: index of this host among those with a process of this local rank.
      cross_size: number of these hosts.
      is_homogeneous: whether every host has the same number of processes.
      group: control plane of the job's processes.
      object_key: secret of the job's processes, which signs the objects that they exchange.
      collectives: collectives of all ranks, usable anywhere in this process, eagerly and in `tf.function`.
      reduces: dtypes that can be reduced.
      moves: dtypes that can be gathered, broadcast and exchanged.
      is_elastic: whether the number of ranks may change between runs of the same traced graph.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool = True
    group: Group
    object_key: str
    collectives: Collectives
    reduces: frozenset[tf.DType]
    moves: frozenset[tf.DType]
    is_elastic: bool = False

    @abc.abstractmethod
    def collectives_of(self, process_set: Any) -> Collectives:
        """Returns the collectives of a set of ranks; those of one replica on a rank that is not in it."""

    @abc.abstractmethod
    def reduce(
        self, tensors: Sequence[tf.Tensor], op: ReduceOp, call: CallId, prescale: float, postscale: float
    ) -> list[tf.Tensor]:
        """Reduces each tensor elementwise over the ranks, not by Adasum, and scales it before and after.

        Args:
          tensors: tensors of dtypes in `reduces`.
          op: the reduction.
          call: identifies the call.
          prescale: factor before the reduction.
          postscale: factor after the reduction.
        """

    @abc.abstractmethod
    def gather(self, tensors: Sequence[tf.Tensor], call: CallId) -> list[tf.Tensor]:
        """Concatenates each tensor of all ranks along the first dim, which may differ between ranks."""

    @abc.abstractmethod
    def broadcast(self, tensor: tf.Tensor, root: int, call: CallId) -> tf.Tensor:
        """Returns the tensor of rank `root` of the job, on every rank of the call."""

    @abc.abstractmethod
    def exchange(self, tensor: tf.Tensor, splits: tf.Tensor, call: CallId) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[r]` rows to rank r; returns the rows received, by sender, and their number from each sender."""

    @abc.abstractmethod
    def join(self) -> tf.Tensor:
        """Waits until all ranks are out of data; returns the last rank that joined."""

    def has_no_joined_rank(self) -> bool:
        """Returns whether no rank has joined so far; collective over the ranks that have not."""
        return True

    @abc.abstractmethod
    def size_of(self, process_set_id: int) -> tf.Tensor:
        """Returns the number of ranks in a set, as a scalar int32."""

    @abc.abstractmethod
    def included_in(self, process_set_id: int) -> tf.Tensor:
        """Returns whether this rank is in a set: a scalar int32, 1 or 0."""

    @abc.abstractmethod
    def rank_of(self, kind: str) -> tf.Tensor:
        """Returns this process's "rank", "local_rank" or "local_size", as a scalar int32."""

    def count(self, process_set: Any) -> int | tf.Tensor:
        """Returns the number of ranks in a set; a scalar int32 if it may change between runs of the same graph."""
        return process_set.size()

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the engine, but not the group."""


def horovod_required(what: str, alternative: str) -> InputError:
    """Returns the error for a feature that needs Horovod, with an alternative."""
    return InputError(
        f"{what} needs Horovod. Received: a job on tf.distribute's collectives. {alternative}, or run `tfdist install_horovod`."
    )


def scaled(tensor: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """Multiplies a tensor by a factor, in its own dtype, like Horovod.

    Integers are multiplied in float64 and rounded towards zero; 16-bit floats in float32 and rounded once.

    Args:
      tensor: tensor of any numeric dtype.
      factor: a number, or a scalar float64 if it is known only when the graph runs.
    """
    if not isinstance(factor, tf.Tensor) and factor == 1.0:
        return tensor
    exact = tf.float32 if tensor.dtype in (tf.float16, tf.bfloat16) else tensor.dtype
    exact = exact if exact.is_floating else tf.float64
    times = tf.cast(factor, exact) if isinstance(factor, tf.Tensor) else tf.constant(factor, exact)
    return tf.cast(tf.cast(tensor, exact) * times, tensor.dtype)


_SAME_BITS = {tf.bfloat16: tf.int16, tf.uint32: tf.int32, tf.uint64: tf.int64}
_WIDER = {
    tf.bfloat16: tf.float32,
    tf.bool: tf.int32,
    tf.int8: tf.int32,
    tf.uint8: tf.int32,
    tf.int16: tf.int32,
    tf.uint16: tf.int32,
}


def reduce_in_supported_dtype(
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


def move_in_supported_dtype(
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
    conversions = [_conversion(engine, tensor.dtype, what) for tensor in tensors]
    sent = [convert(tensor, dtype) for tensor, (convert, dtype) in zip(tensors, conversions, strict=True)]
    received = move(sent)
    return [
        convert(result, tensor.dtype)
        for result, tensor, (convert, _) in zip(received, tensors, conversions, strict=True)
    ]


def _conversion(engine: Engine, dtype: tf.DType, what: str) -> tuple[Callable[..., tf.Tensor], tf.DType]:
    if dtype in engine.moves:
        return tf.cast, dtype
    if _SAME_BITS.get(dtype) in engine.moves:
        return tf.bitcast, _SAME_BITS[dtype]
    if _WIDER.get(dtype) in engine.moves:
        return tf.cast, _WIDER[dtype]
    raise InvalidArgumentError(
        f"{what} needs a tensor of a supported dtype. Received: {dtype.name}. Cast it to another dtype."
    )


_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_./-]")
_counters: weakref.WeakKeyDictionary[Any, itertools.count] = weakref.WeakKeyDictionary()


def call_of(operation: str, name: str | None, process_set: Any, ignore_name_scope: bool = False) -> CallId:
    """Returns the call of an operation.

    Without a name, calls are numbered within their graph, in the order of tracing, so that ranks that trace the same code
    match, independently of earlier tracing. Eager calls are sequential, so the name of the operation suffices.

    Args:
      operation: name of the operation.
      name: the user's name, or None.
      process_set: the ranks that make the call.
      ignore_name_scope: whether TensorFlow's name scopes are left out of the name.
    """
    if name:
        valid_name = _NOT_IN_NAMES.sub("_", name)
        valid_name = valid_name if valid_name[0].isalnum() else f"x{valid_name}"
        return CallId(valid_name, process_set, explicit=True, ignore_name_scope=ignore_name_scope)
    if tf.executing_eagerly():
        return CallId(operation, process_set, ignore_name_scope=ignore_name_scope)
    number = next(_counters.setdefault(tf.compat.v1.get_default_graph(), itertools.count()))
    return CallId(f"{operation}_{number}", process_set, ignore_name_scope=ignore_name_scope)


class Agreement:
    """Compares each call over the job's group: eager calls before they run, those in a `tf.function` during tracing.

    TensorFlow's collectives match calls by order only: a sum on one rank and a mean on another would silently give
    wrong numbers. Cost: one round trip to rank 0 per eager or traced call, about a millisecond; none when a graph runs.

    Args:
      group: group of all ranks.
      deadline: seconds to wait for other ranks.
    """

    def __init__(self, group: Group, deadline: float):
        self._group, self._deadline = group, deadline
        self._numbers = itertools.count(1)

    def check(self, name: str, operation: str, tensors: Sequence[tf.Tensor], uneven: bool = False) -> None:
        """Checks that every rank makes this call next.

        Args:
          name: name of the call.
          operation: the operation with all parameters that must be equal.
          tensors: inputs of the call.
          uneven: whether ranks may have different numbers of rows.

        Raises:
          FailedPreconditionError: on every rank, with the call of each of them.
          NoGraphError: the call is in a TensorFlow 1 graph.
          PeerLostError: a rank did not call in time, or is lost; names the call.
        """
        check_no_old_graph(f"hvd.{name}")
        description = f"{name}: {operation} of {', '.join(_describe(tensor, uneven) for tensor in tensors)}"
        number = next(self._numbers)
        try:
            self._group.agree("horovod/calls", {f"call {number}": description}, "The hvd ", self._deadline)
        except InputError as error:
            raise FailedPreconditionError(str(error)) from error
        except PeerLostError as error:
            raise PeerLostError(f"The hvd call {number}, {description}, was not made by every rank: {error}") from error


def _describe(tensor: tf.Tensor, uneven: bool) -> str:
    if tensor.shape.rank is None:
        return f"{tensor.dtype.name}[...]"
    sizes = ["?" if size is None else str(size) for size in tensor.shape]
    return f"{tensor.dtype.name}[{', '.join(['rows', *sizes[1:]] if uneven else sizes)}]"
