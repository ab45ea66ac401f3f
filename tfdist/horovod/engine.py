"""The contract `Engine`: who the ranks are, and the operations between them that everything else is made of."""

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
class Call:
    """What identifies one call of an operation, the same on every rank.

    Attributes:
      name: by which engines that match messages by name find the other ranks' part.
      process_set: the ranks that make the call.
      explicit: whether the user gave the name, which then counts eagerly too.
      ignore_name_scope: whether TensorFlow's name scopes are no part of the name.
    """

    name: str
    process_set: Any
    explicit: bool = False
    ignore_name_scope: bool = False

    def then(self, what: str) -> "Call":
        """Another call that belongs to this one."""
        return dataclasses.replace(self, name=f"{self.name}_{what}")


class Engine(abc.ABC):
    """What an engine does for `tfdist.horovod`.

    The operations take tensors that lie on this rank and give such; gradients do not flow through them, which
    `tfdist.horovod.reductions` and `tfdist.horovod.moves` see to. A list of several tensors travels together.

    Attributes:
      rank: this process's number among `size`.
      size: how many processes there are.
      local_rank: its number among the `local_size` processes of its host.
      local_size: how many processes its host has.
      cross_rank: the number of its host among those with a process of this local rank.
      cross_size: how many such hosts there are.
      is_homogeneous: whether every host has the same number of processes.
      group: the control plane of the job's processes.
      collectives: those of all ranks, usable anywhere in this process, eagerly and in `tf.function`.
      reduces: the dtypes that are combined.
      moves: the dtypes that are gathered, broadcast and exchanged.
      size_changes: whether the number of ranks may change, and a graph that was traced before that runs again.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool = True
    group: Group
    collectives: Collectives
    reduces: frozenset[tf.DType]
    moves: frozenset[tf.DType]
    size_changes: bool = False

    @abc.abstractmethod
    def collectives_of(self, process_set: Any) -> Collectives:
        """The collectives of a set of ranks; those of one replica for a rank that is not in it."""

    @abc.abstractmethod
    def reduce(
        self, tensors: Sequence[tf.Tensor], op: ReduceOp, call: Call, prescale: float, postscale: float
    ) -> list[tf.Tensor]:
        """Combines each tensor, of a dtype in `reduces`, elementwise (no Adasum) over the ranks; factors before and after."""

    @abc.abstractmethod
    def gather(self, tensors: Sequence[tf.Tensor], call: Call) -> list[tf.Tensor]:
        """Concatenates each tensor of all ranks, of any number of rows, along the first dim."""

    @abc.abstractmethod
    def broadcast(self, tensor: tf.Tensor, root: int, call: Call) -> tf.Tensor:
        """The tensor of the rank `root` of the job, on every rank of the call."""

    @abc.abstractmethod
    def exchange(self, tensor: tf.Tensor, splits: tf.Tensor, call: Call) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[r]` rows to rank r; returns what came, by sender, and how much of each."""

    @abc.abstractmethod
    def join(self) -> tf.Tensor:
        """Waits until all ranks have no more data; returns the last one that joined."""

    @abc.abstractmethod
    def size_of(self, process_set_id: int) -> tf.Tensor:
        """The number of ranks of a set, as a scalar int32."""

    @abc.abstractmethod
    def included_in(self, process_set_id: int) -> tf.Tensor:
        """Whether this rank is in a set: a scalar int32, 1 or 0."""

    @abc.abstractmethod
    def rank_of(self, kind: str) -> tf.Tensor:
        """This rank, "rank", or a count of ranks, "local_rank" or "local_size", as a scalar int32."""

    def count(self, process_set: Any) -> int | tf.Tensor:
        """The number of ranks of a set; a scalar int32 where it may change while a graph is kept."""
        return process_set.size()

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the engine; the group stays."""


def needs_horovod(what: str, instead: str) -> InputError:
    """The error of what the engine without Horovod lacks; `instead` names what to use."""
    return InputError(
        f"{what} needs Horovod. Received: a job on tf.distribute's collectives. {instead}, or run "
        "`python -m tfdist.install_horovod`."
    )


def scaled(tensor: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """A tensor times a factor, in its own dtype, as Horovod does it.

    Whole numbers are multiplied in float64 and rounded towards zero, 16-bit floats in float32 and rounded once.

    Args:
      tensor: of any number's dtype.
      factor: a number; or a scalar float64 where it is known only when the graph runs.
    """
    if not isinstance(factor, tf.Tensor) and factor == 1.0:
        return tensor
    exact = tf.float32 if tensor.dtype in (tf.float16, tf.bfloat16) else tensor.dtype
    exact = exact if exact.is_floating else tf.float64
    times = tf.cast(factor, exact) if isinstance(factor, tf.Tensor) else tf.constant(factor, exact)
    return tf.cast(tf.cast(tensor, exact) * times, tensor.dtype)
