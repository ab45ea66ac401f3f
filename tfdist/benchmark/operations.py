"""The measured operations: what a replica hands over for a size, and the call."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.errors import InputError

Call = Callable[[Collectives, tf.Tensor, str], tf.Tensor]


class Operation(NamedTuple):
    """One method of `Collectives`.

    Attributes:
      call: makes it, with a tensor of one dim and a name; returns what came of it.
      parts: whether its bytes are N parts, one of each replica.
      hands_over_all: whether a replica hands over all of the bytes, or its part.
      reduces: whether it sums, which fewer dtypes can.
    """

    call: Call
    parts: bool = False
    hands_over_all: bool = True
    reduces: bool = False

    def elements(self, size: int, itemsize: int, replicas: int) -> tuple[int, int]:
        """How many elements a replica hands over, at least one a part, and the bytes that this makes.

        Args:
          size: wanted bytes.
          itemsize: bytes of an element.
          replicas: how many.
        """
        parts = replicas if self.parts else 1
        part = max(1, size // itemsize // parts)
        return part * (parts if self.hands_over_all else 1), part * parts * itemsize


def _barrier(collectives: Collectives, tensor: tf.Tensor, name: str) -> tf.Tensor:
    done = collectives.barrier(name=name)
    if tf.is_tensor(done):  # its value must be used: TensorFlow drops a Horovod operation that only others wait for
        return done
    with tf.control_dependencies([done]):
        return tf.identity(tensor)


OPERATIONS: Mapping[str, Operation] = {
    "all_reduce": Operation(lambda c, x, name: c.all_reduce([x], name=name)[0], reduces=True),
    "all_gather": Operation(lambda c, x, name: c.all_gather([x], name=name)[0], parts=True, hands_over_all=False),
    "all_to_all": Operation(lambda c, x, name: c.all_to_all([x], name=name)[0], parts=True),
    "reduce_scatter": Operation(lambda c, x, name: c.reduce_scatter([x], name=name)[0], parts=True, reduces=True),
    "broadcast": Operation(lambda c, x, name: c.broadcast([x], name=name)[0]),
    "barrier": Operation(_barrier),
}


def check_dtype(collectives: Collectives, names: Sequence[str], dtype: tf.DType) -> None:
    """Makes sure that the engine carries a dtype.

    Raises:
      InputError: it does not, for one of the operations.
    """
    for name in names:
        wire = collectives.wire.reduces if OPERATIONS[name].reduces else collectives.wire.gathers
        if name != "barrier" and dtype not in wire:
            known = ", ".join(sorted(each.name for each in wire))
            raise InputError(
                f"--dtype must be one that the strategy's {name} carries: {known}. Received: {dtype.name}. Choose one of "
                f"them, or leave {name} out of --operations."
            )
