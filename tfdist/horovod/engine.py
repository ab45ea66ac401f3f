"""The contract `Engine`: the ranks, their operations, names of calls, and the comparison of calls between ranks."""

import abc
import dataclasses
import itertools
import re
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.coordination import Group
from tfdist.errors import InputError, PeerLostError
from tfdist.horovod.errors import FailedPreconditionError, check_no_old_graph
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

    def then(self, what: str) -> "CallId":
        """Returns another call that belongs to this one."""
        return dataclasses.replace(self, name=f"{self.name}_{what}")


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
      size_changes: whether the number of ranks may change between runs of the same traced graph.
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
    size_changes: bool = False

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

    def all_take_part(self) -> bool:
        """Returns whether no rank has joined so far; the ranks that have not must call it together."""
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


def needs_horovod(what: str, instead: str) -> InputError:
    """Returns the error for a feature that needs Horovod; `instead` names the alternative."""
    return InputError(
        f"{what} needs Horovod. Received: a job on tf.distribute's collectives. {instead}, or run `tfdist install_horovod`."
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


_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_./-]")
_counters: weakref.WeakKeyDictionary[Any, itertools.count] = weakref.WeakKeyDictionary()


def call_of(operation: str, name: str | None, process_set: Any, ignore_name_scope: bool = False) -> CallId:
    """Returns the call of an operation.

    Without a name, calls are numbered within their graph, in the order of tracing, so that ranks that trace the same
    code match, however often each has traced before. Eager calls are sequential, and the name of the operation
    suffices.

    Args:
      operation: name of the operation.
      name: the user's name, or None.
      process_set: the ranks that make the call.
      ignore_name_scope: whether TensorFlow's name scopes are left out of the name.
    """
    if name:
        clean = _NOT_IN_NAMES.sub("_", name)
        clean = clean if clean[0].isalnum() else f"x{clean}"
        return CallId(clean, process_set, explicit=True, ignore_name_scope=ignore_name_scope)
    if tf.executing_eagerly():
        return CallId(operation, process_set, ignore_name_scope=ignore_name_scope)
    number = next(_counters.setdefault(tf.compat.v1.get_default_graph(), itertools.count()))
    return CallId(f"{operation}_{number}", process_set, ignore_name_scope=ignore_name_scope)


class Agreement:
    """Compares each call over the job's group: eager calls before they run, those in a `tf.function` during tracing.

    TensorFlow's collectives match calls by order only: a sum on one rank and a mean on another would silently give
    wrong numbers. Cost: one round trip to rank 0 per eager or traced call, about a millisecond; none when a graph runs.
    """

    def __init__(self, group: Group, deadline: float):
        """Initializes the comparison.

        Args:
          group: group of all ranks.
          deadline: seconds to wait for other ranks.
        """
        self._group, self._deadline = group, deadline
        self._numbers = itertools.count(1)

    def check(self, name: str, what: str, tensors: Sequence[tf.Tensor], uneven: bool = False) -> None:
        """Checks that every rank makes this call next.

        Args:
          name: name of the call.
          what: the operation with all parameters that must be equal.
          tensors: inputs of the call.
          uneven: whether ranks may have different numbers of rows.

        Raises:
          FailedPreconditionError: on every rank, with the call of each of them.
          NoGraphError: the call is in a TensorFlow 1 graph.
          PeerLostError: a rank did not call in time, or is lost; names the call.
        """
        check_no_old_graph(f"hvd.{name}")
        called = f"{name}: {what} of {', '.join(_described(tensor, uneven) for tensor in tensors)}"
        number = next(self._numbers)
        try:
            self._group.agree("horovod/calls", {f"call {number}": called}, "The hvd ", self._deadline)
        except InputError as error:
            raise FailedPreconditionError(str(error)) from error
        except PeerLostError as error:
            raise PeerLostError(f"The hvd call {number}, {called}, was not made by every rank: {error}") from error


def _described(tensor: tf.Tensor, uneven: bool) -> str:
    if tensor.shape.rank is None:
        return f"{tensor.dtype.name}[...]"
    sizes = ["?" if size is None else str(size) for size in tensor.shape]
    return f"{tensor.dtype.name}[{', '.join(['rows', *sizes[1:]] if uneven else sizes)}]"
