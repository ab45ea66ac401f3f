"""All-reduce by recursive halving and doubling."""

import tensorflow as tf

from tfdist.cluster.topology import Topology
from tfdist.collectives.algorithms import tree
from tfdist.collectives.algorithms.folding import Folding
from tfdist.collectives.algorithms.messages import padded, send_receive
from tfdist.collectives.interface import Collectives


def halving_doubling(collectives: Collectives, vector: tf.Tensor, topology: Topology, name: str) -> tf.Tensor:
    """Sums a vector by recursive halving (a reduce-scatter) and recursive doubling (an all-gather).

    In each of log2 N steps, replicas whose numbers differ in one bit, the lowest first, divide what they have: each sends
    the half that the other one keeps, and adds. Then each has the sum of one part, and in log2 N more steps, the highest bit
    first, the pairs exchange what they have. The largest messages are between neighbors, usually inside a host.

    Steps: 2 log2 N; if N is not a power of two, two more, see `Folding`. Sent: 2 n (N - 1) / N for a power of two, half of it
    in the first halving and the last doubling. For vectors of medium size.

    Rabenseifner, "Optimization of collective reduction operations", ICCS 2004.
    """
    folding = Folding(collectives.size)

    def halved_and_doubled(part: tf.Tensor, member: int) -> tf.Tensor:
        part = padded(part, folding.members)
        for bit in folding.bits():
            lower, upper = tf.split(part, 2)
            kept, given = (upper, lower) if member & bit else (lower, upper)
            part = kept + send_receive(collectives, given, folding.rank_of(member ^ bit), f"{name}/halving{bit}")
        for bit in reversed(folding.bits()):
            other = send_receive(collectives, part, folding.rank_of(member ^ bit), f"{name}/doubling{bit}")
            part = tf.concat([other, part] if member & bit else [part, other], 0)
        return part[: vector.shape[0]]

    return folding.summed(collectives, vector, halved_and_doubled, name)


def groups(topology: Topology) -> list[tuple[int, ...]]:
    """Returns the pairs of replicas that communicate."""
    return tree.groups(topology)
