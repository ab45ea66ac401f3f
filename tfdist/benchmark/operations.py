"""The measured operations: the input of a replica for a size, and the call."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.collectives import Collectives
from tfdist.errors import InputError

RecordedCall = Callable[[Collectives, tf.Tensor, str], tf.Tensor]


class Operation(NamedTuple):
    """One method of `Collectives`.

    Attributes:
      call: calls the method with a one-dimensional tensor and a name; returns the result.
      parts: whether its bytes consist of N parts, one per replica.
      hands_over_all: whether the input of a replica has all of the bytes, or only its part.
      reduces: whether it sums, which fewer dtypes support.
    """

    call: RecordedCall
    parts: bool = False
    input_is_complete: bool = True
    reduces: bool = False

    def elements(self, size: int, itemsize: int, replicas: int) -> tuple[int, int]:
        """Returns the number of elements in a replica's input, at least one per part, and the resulting bytes.

        Args:
          size: requested bytes.
          itemsize: bytes per element.
          replicas: number of replicas.
        """
        parts = replicas if self.parts else 1
        part = max(1, size // itemsize // parts)
        return part * (parts if self.input_is_complete else 1), part * parts * itemsize


def _barrier(collectives: Collectives, tensor: tf.Tensor, name: str) -> tf.Tensor:
    done = collectives.barrier(name=name)
    # Its value must be used, because TensorFlow prunes a Horovod operation whose result is unused.
    if tf.is_tensor(done):
        return done
    with tf.control_dependencies([done]):
        return tf.identity(tensor)


OPERATIONS: Mapping[str, Operation] = {
    "all_reduce": Operation(lambda c, x, name: c.all_reduce([x], name=name)[0], reduces=True),
    "all_gather": Operation(lambda c, x, name: c.all_gather([x], name=name)[0], parts=True, input_is_complete=False),
    "all_to_all": Operation(lambda c, x, name: c.all_to_all([x], name=name)[0], parts=True),
    "reduce_scatter": Operation(lambda c, x, name: c.reduce_scatter([x], name=name)[0], parts=True, reduces=True),
    "broadcast": Operation(lambda c, x, name: c.broadcast([x], name=name)[0]),
    "barrier": Operation(_barrier),
}


def check_dtype(collectives: Collectives, names: Sequence[str], dtype: tf.DType) -> None:
    """Checks that the engine supports a dtype.

    Raises:
      InputError: one of the operations does not support it.
    """
    for name in names:
        wire = collectives.wire.reduces if OPERATIONS[name].reduces else collectives.wire.gathers
        if name != "barrier" and dtype not in wire:
            known = ", ".join(sorted(each.name for each in wire))
            raise InputError(
                f"--dtype must be supported by {name} of this strategy: {known}. Received: {dtype.name}. Choose one of "
                f"them, or leave {name} out of --operations."
            )
