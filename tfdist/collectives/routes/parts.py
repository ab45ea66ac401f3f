"""What routes share: equal parts of a vector, messages, and a number of replicas that is a power of two."""

from collections.abc import Callable

import tensorflow as tf

from tfdist.collectives.interface import Collectives


def padded(vector: tf.Tensor, parts: int) -> tf.Tensor:
    """Returns a vector with zeros at its end, so that it can be divided into equal parts."""
    return tf.pad(vector, [[0, -vector.shape[0] % parts]])


def power_of_two(replicas: int) -> int:
    """Returns the largest power of two of at most this many replicas."""
    return 1 << (replicas.bit_length() - 1)


def receive(collectives: Collectives, like: tf.Tensor, source: int, tag: str) -> tf.Tensor:
    """Receives a vector of the shape and dtype of another one."""
    [arrived] = collectives.receive([tf.TensorSpec(like.shape, like.dtype)], source, tag=tag)
    return arrived


def exchange(collectives: Collectives, tensor: tf.Tensor, partner: int, name: str) -> tf.Tensor:
    """Sends a vector to a partner, which does the same, and returns the partner's; n sent.

    An engine with a native all-to-all also gathers in one message, in both directions at the same time, while two messages
    between two ranks would follow each other. On others, a gather is preceded by a message with the numbers of rows.
    """
    if not collectives.wire.exchanges:
        collectives.send([tensor], partner, tag=name)
        return receive(collectives, tensor, partner, name)
    pair = collectives.group(sorted((collectives.static_rank, partner)))
    [both] = pair.all_gather([tensor], name=name)
    size = tensor.shape[0]
    return tf.ensure_shape(both[:size] if pair.static_rank else both[size:], tensor.shape)


class Folding:
    """Reduces any number of replicas to a power of two before a sum, as in Thakur et al. (2005), 4.5.

    Of N = P + E replicas, P a power of two, the first 2 E form pairs. In each, the first replica sends its vector to the
    second one, which sums on behalf of both and returns the result: two more steps, and 2 n bytes for such a pair.
    """

    def __init__(self, replicas: int):
        """Initializes the numbering.

        Args:
          replicas: number of replicas, at least 1.
        """
        self.members = power_of_two(replicas)
        self._extra = replicas - self.members

    def rank_of(self, member: int) -> int:
        """Returns the rank of a member, one of the P replicas that sum."""
        return 2 * member + 1 if member < self._extra else member + self._extra

    def pairs(self) -> list[tuple[int, int]]:
        """Returns the ranks of each pair."""
        return [(2 * i, 2 * i + 1) for i in range(self._extra)]

    def partners(self) -> list[tuple[int, int]]:
        """Returns the ranks of members whose numbers differ in one bit, each two in ascending order."""
        numbers = [(i, i ^ bit) for bit in self.bits() for i in range(self.members) if not i & bit]
        return [(self.rank_of(i), self.rank_of(j)) for i, j in numbers]

    def bits(self) -> list[int]:
        """Returns 1, 2, 4, ... below the number of members."""
        return [1 << i for i in range(self.members.bit_length() - 1)]

    def summed(
        self,
        collectives: Collectives,
        vector: tf.Tensor,
        sum_over_members: Callable[[tf.Tensor, int], tf.Tensor],
        name: str,
    ) -> tf.Tensor:
        """Returns the sum over all replicas.

        Args:
          collectives: collectives of all replicas.
          vector: this replica's vector.
          sum_over_members: takes a vector and the own number among the members; called on members only.
          name: names the messages.
        """
        rank = collectives.static_rank
        if rank >= 2 * self._extra:
            return sum_over_members(vector, rank - self._extra)
        if rank % 2:
            both = receive(collectives, vector, rank - 1, f"{name}/fold") + vector
            total = sum_over_members(both, rank // 2)
            collectives.send([total], rank - 1, tag=f"{name}/unfold")
            return total
        collectives.send([vector], rank + 1, tag=f"{name}/fold")
        return receive(collectives, vector, rank + 1, f"{name}/unfold")
