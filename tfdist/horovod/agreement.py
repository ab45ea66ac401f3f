"""What ranks say of a call before they make it, where the collectives themselves compare nothing."""

import itertools
from collections.abc import Sequence

import tensorflow as tf

from tfdist.coordination import Group
from tfdist.errors import InputError, PeerLostError
from tfdist.horovod.errors import FailedPreconditionError, check_no_old_graph


class Agreement:
    """Compares each call over the job's group: eagerly before it runs, in a `tf.function` when it is traced.

    TensorFlow's collectives match calls by their order alone: a sum on one rank and a mean on another give numbers that are
    wrong, without a word. Cost: one round trip to rank 0 a call that is eager or traced, about a millisecond; none in a
    graph that runs.
    """

    def __init__(self, group: Group, deadline: float):
        """Args: group: of all ranks; deadline: in seconds, how long a rank is waited for."""
        self._group, self._deadline = group, deadline
        self._numbers = itertools.count(1)

    def check(self, name: str, what: str, tensors: Sequence[tf.Tensor], uneven: bool = False) -> None:
        """Returns if every rank makes this call next.

        Args:
          name: the call's.
          what: the operation, with all of its parameters that must be the same.
          tensors: that it takes.
          uneven: whether ranks may have different numbers of rows.

        Raises:
          FailedPreconditionError: on every rank, with what each of them calls.
          NoGraphError: the call is of a graph of TensorFlow 1.
          PeerLostError: a rank does not come in time, or is lost; names the call.
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
