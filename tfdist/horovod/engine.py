"""The contract `Engine`: the ranks, and the operations between them of which everything else is composed."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.coordination import Group
from tfdist.errors import InputError
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
