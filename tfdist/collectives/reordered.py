"""A group whose ranks are in another order than that of its engine."""

from collections.abc import Sequence

import tensorflow as tf

from tfdist.collectives.interface import Collectives, Op


def in_order(inner: Collectives, ranks: Sequence[int]) -> Collectives:
    """Returns the collectives of a group in the order of `ranks`.

    Args:
      inner: collectives of these ranks in ascending order.
      ranks: ranks of a larger group.
    """
    ascending = sorted(ranks)
    order = tuple(ascending.index(rank) for rank in ranks)
    return inner if list(ranks) == ascending else Reordered(inner, order)


class Reordered(Collectives):
    """Collectives with other numbers for the same ranks. Operations that depend on the order are composed of gathers."""

    def __init__(self, inner: Collectives, order: tuple[int, ...]):
        """Wraps the collectives of an engine.

        Args:
          inner: collectives in the engine's order.
          order: rank in `inner` of each new rank.
        """
        self._inner = inner
        self._order = order
        self.size = inner.size
        self.wire = inner.wire

    @property
    def rank(self) -> int:
        """See base class."""
        return self._order.index(self._inner.static_rank)

    def all_reduce(self, tensors: Sequence[tf.Tensor], op: Op = "sum", *, name: str) -> list[tf.Tensor]:
        """See base class."""
        return self._inner.all_reduce(tensors, op, name=name)

    def all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """See base class; the numbers of rows are gathered, too."""
        rows = tf.stack([tf.shape(tensor)[0] for tensor in tensors])
        table, *wholes = self._inner.all_gather([rows[None], *tensors], name=name)
        results = []
        for i, whole in enumerate(wholes):
            parts = tf.split(whole, tf.ensure_shape(table, [self.size, None])[:, i], num=self.size)
            results.append(tf.concat([parts[place] for place in self._order], 0))
        return results

    def broadcast(self, tensors: Sequence[tf.Tensor], root: int = 0, *, name: str) -> list[tf.Tensor]:
        """See base class."""
        return self._inner.broadcast(tensors, self._order[root], name=name)

    def group(self, ranks: Sequence[int]) -> Collectives:
        """See base class."""
        return self._inner.group([self._order[rank] for rank in self.checked(ranks)])

    def send(self, tensors: Sequence[tf.Tensor], to: int, *, tag: str) -> tf.Tensor:
        """See base class."""
        self.check_message(tensors, to, tag)
        return self._inner.send(tensors, self._order[to], tag=tag)

    def receive(self, specs: Sequence[tf.TensorSpec], source: int, *, tag: str) -> list[tf.Tensor]:
        """See base class."""
        self.check_message(specs, source, tag)
        return self._inner.receive(specs, self._order[source], tag=tag)
