"""The interface `Engine`, and the names by which ranks identify a call."""

import abc
import dataclasses
import itertools
import re
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.collectives.interface import to_transferable
from tfdist.coordination import Group
from tfdist.errors import InputError
from tfdist.horovod.errors import InvalidArgumentError
from tfdist.horovod.ops import ReduceOp

Factors: TypeAlias = tuple[float, float]  # of tensors before a reduction, and of its results


@dataclasses.dataclass(frozen=True)
class CallId:
    """Identifies one call of an operation; the same on every rank."""

    name: str  # by which some engines match the ranks' calls
    process_set: Any  # the ranks that make the call
    has_user_name: bool = False  # whether the user has named the call; the name is then used for eager calls, too
    ignore_name_scope: bool = False  # whether the name omits TensorFlow's name scopes

    def with_suffix(self, suffix: str) -> "CallId":
        """Returns a related call, with a suffix of the name."""
        return dataclasses.replace(self, name=f"{self.name}_{suffix}")


class Engine(abc.ABC):
    """The operations that `tfdist.horovod` needs from an engine.

    The operations take and return tensors of this rank, and are not differentiable; `tfdist.horovod.operations`
    adds gradients. Tensors of a list are sent together.
    """

    rank: int  # the first seven are what the functions of `tfdist.horovod.process` return
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool = True
    group: Group  # control plane of the job's processes
    object_key: str  # secret of the job, with which the processes sign objects
    collectives: Collectives  # of all ranks, usable anywhere in this process, eagerly and in `tf.function`
    reducible_dtypes: frozenset[tf.DType]
    is_elastic: bool = False  # whether the number of ranks may change between runs of the same traced graph

    @abc.abstractmethod
    def collectives_of(self, process_set: Any) -> Collectives:
        """Returns the collectives of a process set; on ranks outside the set, the collectives of a single replica."""

    @abc.abstractmethod
    def reduce(self, tensors: Sequence[tf.Tensor], op: ReduceOp, call: CallId, factors: Factors) -> list[tf.Tensor]:
        """Reduces tensors elementwise by any operation except Adasum; scales inputs and results.

        The tensors must have dtypes in `reducible_dtypes`.
        """

    @abc.abstractmethod
    def gather(self, tensors: Sequence[tf.Tensor], call: CallId) -> list[tf.Tensor]:
        """Concatenates the ranks' tensors along the first dim, which may differ between ranks."""

    @abc.abstractmethod
    def broadcast(self, tensor: tf.Tensor, root: int, call: CallId) -> tf.Tensor:
        """Returns the tensor of the job's rank `root` on every rank of the call."""

    @abc.abstractmethod
    def exchange(self, tensor: tf.Tensor, splits: tf.Tensor, call: CallId) -> tuple[tf.Tensor, tf.Tensor]:
        """Sends `splits[r]` rows to rank r; returns the rows received, ordered by sender, and their number by sender."""

    @abc.abstractmethod
    def join(self) -> tf.Tensor:
        """Waits until all ranks have joined; returns the last one."""

    def has_no_joined_rank(self) -> bool:
        """Returns whether no rank has joined yet; every rank that has not joined must call it."""
        return True

    @abc.abstractmethod
    def query(self, name: str, process_set_id: int = 0) -> tf.Tensor:
        """Returns "rank", "local_rank" or "local_size", or a set's "size" or "process_set_included", as a scalar int32."""

    def count(self, process_set: Any) -> int | tf.Tensor:
        """Returns the number of ranks in a set; a scalar int32 if it may change between runs of a graph."""
        return process_set.size()

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the engine without leaving the group."""


def horovod_required_error(feature: str, alternative: str) -> InputError:
    """Returns the error for a feature that needs Horovod, with an alternative."""
    return InputError(
        f"{feature} needs Horovod. Received: a job on tf.distribute's collectives. {alternative}, or run "
        "`tfdist install_horovod`."
    )


def scale_tensor(tensor: tf.Tensor, factor: float | tf.Tensor) -> tf.Tensor:
    """Multiplies a tensor by a number, or a scalar float64 tensor, keeping its dtype, like Horovod.

    Integers are multiplied in float64 and rounded toward zero; 16-bit floats are multiplied in float32.
    """
    if not isinstance(factor, tf.Tensor) and factor == 1.0:
        return tensor
    dtype = tf.float32 if tensor.dtype in (tf.float16, tf.bfloat16) else tensor.dtype
    dtype = dtype if dtype.is_floating else tf.float64
    multiplier = tf.cast(factor, dtype) if isinstance(factor, tf.Tensor) else tf.constant(factor, dtype)
    return tf.cast(tf.cast(tensor, dtype) * multiplier, tensor.dtype)


def to_supported_dtype(engine: Engine, tensor: tf.Tensor, operation: str) -> tf.Tensor:
    """Casts a tensor to a dtype that the engine can transfer; casting back is exact.

    Raises:
      InvalidArgumentError: there is no such dtype.
    """
    result = to_transferable(tensor, engine.collectives)
    if result.dtype not in engine.collectives.dtypes.gatherable:
        raise InvalidArgumentError(
            f"{operation} needs a tensor of a supported dtype. Received: {tensor.dtype.name}. Cast it to another dtype."
        )
    return result


_INVALID_CHARACTERS = re.compile(r"[^A-Za-z0-9_./-]")
_counters: weakref.WeakKeyDictionary[Any, itertools.count] = weakref.WeakKeyDictionary()


def call_of(operation: str, name: str | None, process_set: Any, ignore_name_scope: bool = False) -> CallId:
    """Returns the id of a call of an operation, with the user's name or a generated name.

    Calls in a graph are numbered in the order of tracing, independently of other graphs: ranks that trace the same code
    generate the same names. Eager calls are sequential, so the name of the operation suffices.
    """
    if name:
        valid_name = _INVALID_CHARACTERS.sub("_", name)
        call_name = valid_name if valid_name[0].isalnum() else f"x{valid_name}"
    elif tf.executing_eagerly():
        call_name = operation
    else:
        call_name = f"{operation}_{next(_counters.setdefault(tf.compat.v1.get_default_graph(), itertools.count()))}"
    return CallId(call_name, process_set, bool(name), ignore_name_scope)
