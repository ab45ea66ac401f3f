"""A number of replicas that is a power of two, for algorithms that need one."""

from collections.abc import Callable

import tensorflow as tf

from tfdist.collectives.algorithms.messages import receive
from tfdist.collectives.interface import Collectives


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
        self.members = 1 << (replicas.bit_length() - 1)  # the largest power of two
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
