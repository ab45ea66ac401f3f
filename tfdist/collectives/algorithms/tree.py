"""All-reduce by recursive doubling."""

import tensorflow as tf

from tfdist.cluster.topology import Topology
from tfdist.collectives.algorithms.folding import Folding
from tfdist.collectives.algorithms.messages import send_receive
from tfdist.collectives.interface import Collectives


def tree(collectives: Collectives, vector: tf.Tensor, topology: Topology, name: str) -> tf.Tensor:
    """Sums a vector by recursive doubling: along the N binomial trees that end at each of the replicas, at the same time.

    In step i, replicas whose numbers differ in bit i exchange their whole sums and add them: a + b on one is b + a on the
    other, the same bits.

    Steps: log2 N; if N is not a power of two, two more, see `Folding`. Sent: n log2 N. For small vectors, whose time is
    that of the steps.

    Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", IJHPCA 19(1), 2005.
    """
    folding = Folding(collectives.size)

    def doubled(total: tf.Tensor, member: int) -> tf.Tensor:
        for bit in folding.bits():
            partner = folding.rank_of(member ^ bit)
            total += send_receive(collectives, total, partner, f"{name}/distance{bit}")
        return total

    return folding.summed(collectives, vector, doubled, name)


def groups(topology: Topology) -> list[tuple[int, ...]]:
    """Returns the pairs of replicas that communicate."""
    folding = Folding(topology.size)
    return [*folding.pairs(), *folding.partners()]
