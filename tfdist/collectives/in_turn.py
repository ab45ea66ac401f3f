"""Collectives that send one message of limited size at a time, so that those of others can be sent in between."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfdist.collectives.forwarding import ForwardingCollectives
from tfdist.collectives.interface import Collectives, Op

# At 100 Mbit/s, about 0.1 s; on a link where it takes less than the fixed time of a message, nothing has to be hidden.
PIECE_BYTES = 1024 * 1024


class InTurn(ForwardingCollectives):
    """Collectives of which each begins when the previous one has ended, with large tensors in pieces.

    An engine carries out messages in the order in which it gets them. What is sent during training steps therefore must not be
    given to it at once: the small messages of the steps would wait for all of it. One instance serves one trace of one replica.
    Tensors whose shapes are not static are sent as a whole; static shapes must be equal on all ranks, even in a gather.
    """

    def __init__(self, inner: Collectives, piece_bytes: int = PIECE_BYTES):
        """Wraps other collectives.

        Args:
          inner: collectives that do the work.
          piece_bytes: maximum number of bytes of a message.
        """
        super().__init__(inner)
        self._piece_bytes = piece_bytes
        self._last: list[tf.Tensor] = []

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""

        def summed(tensor: tf.Tensor, name: str) -> tf.Tensor:
            if not tensor.shape.is_fully_defined():
                return self._next(self._inner.all_reduce, [tensor], op, name=name)[0]
            pieces = self._pieces(tf.reshape(tensor, [-1]))
            sums = [self._next(self._inner.all_reduce, [x], op, name=f"{name}/{i}")[0] for i, x in enumerate(pieces)]
            return tf.reshape(tf.concat(sums, 0), tensor.shape)

        return self._each(summed, tensors, name)

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class."""

        def gathered(tensor: tf.Tensor, name: str) -> tf.Tensor:
            if not tensor.shape.is_fully_defined():
                return self._next(self._inner.all_gather, [tensor], name=name)[0]
            pieces = self._pieces(tensor)
            found = [self._next(self._inner.all_gather, [x], name=f"{name}/{i}")[0] for i, x in enumerate(pieces)]
            by_rank = [tf.reshape(x, [self.size, *piece.shape]) for x, piece in zip(found, pieces, strict=True)]
            return tf.reshape(tf.concat(by_rank, 1), [self.size * tensor.shape[0], *tensor.shape[1:]])

        return self._each(gathered, tensors, name)

    def all_to_all(
        self, tensors: Sequence[tf.Tensor], *, name: str, splits: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        """See base class; in one message."""
        return self._next(self._inner.all_to_all, tensors, name=name, splits=splits)

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        """See base class; in one message."""
        return self._next(self._inner.broadcast, tensors, root, name=name)

    def reduce_scatter(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class; in one message."""
        return self._next(self._inner.reduce_scatter, tensors, op, name=name)

    def _each(
        self, call: Callable[[tf.Tensor, str], tf.Tensor], tensors: Sequence[tf.Tensor], name: str
    ) -> list[tf.Tensor]:
        return [call(tf.convert_to_tensor(tensor), f"{name}/{i}") for i, tensor in enumerate(tensors)]

    def _pieces(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Divides a tensor along its first dim."""
        rows = tensor.shape[0]
        row_bytes = max(1, tensor.shape[1:].num_elements() * tensor.dtype.size)
        most = max(1, self._piece_bytes // row_bytes)
        sizes = [min(most, rows - first) for first in range(0, rows, most)]
        return tf.split(tensor, sizes) if len(sizes) > 1 else [tensor]

    def _next(
        self, call: Callable[..., list[tf.Tensor]], tensors: Sequence[tf.Tensor], *args: object, **options: object
    ) -> list[tf.Tensor]:
        with tf.control_dependencies(self._last):
            given = [tf.identity(tensor) for tensor in tensors]
        self._last = call(given, *args, **options)
        return self._last
