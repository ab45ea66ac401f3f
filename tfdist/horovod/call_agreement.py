"""Comparison of calls between ranks before they are made, for collectives that compare nothing themselves."""

import itertools
from collections.abc import Sequence

import tensorflow as tf

from tfdist.coordination import Group
from tfdist.errors import InputError, PeerLostError
from tfdist.horovod.errors import FailedPreconditionError, check_no_old_graph


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
