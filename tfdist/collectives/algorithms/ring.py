"""All-reduce around a ring."""

import tensorflow as tf

from tfdist.cluster.topology import Topology
from tfdist.collectives.algorithms.messages import padded, receive
from tfdist.collectives.interface import Collectives


def ring(collectives: Collectives, vector: tf.Tensor, topology: Topology, name: str) -> tf.Tensor:
    """Sums a vector around a ring in rank order; replica r sends to r + 1 and receives from r - 1 only.

    The vector is divided into N parts. In each of N - 1 steps, a replica sends one part and adds its own to the one that it
    receives, after which it has the sum of one part; in N - 1 more steps, the sums go around. Each part is summed in the
    order in which it passes the replicas, and only once, so all replicas have the same bits.

    Steps: 2 (N - 1). Sent: 2 n (N - 1) / N, the least possible, by every replica at the same time. A host is entered and
    left once if its ranks are consecutive. For large vectors.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69(2), 2009.
    """
    size, rank = collectives.size, collectives.static_rank
    following, previous = (rank + 1) % size, (rank - 1) % size
    parts = tf.split(padded(vector, size), size)
    for step in range(size - 1):
        tag = f"{name}/reduce{step}"
        collectives.send([parts[(rank - step) % size]], following, tag=tag)
        mine = (rank - step - 1) % size
        parts[mine] = receive(collectives, parts[mine], previous, tag) + parts[mine]
    for step in range(size - 1):
        tag = f"{name}/gather{step}"
        collectives.send([parts[(rank + 1 - step) % size]], following, tag=tag)
        complete = (rank - step) % size
        parts[complete] = receive(collectives, parts[complete], previous, tag)
    return tf.concat(parts, 0)[: vector.shape[0]]


def groups(topology: Topology) -> list[tuple[int, ...]]:
    """Returns the neighbors on the ring."""
    size = topology.size
    return [tuple(sorted((rank, (rank + 1) % size))) for rank in range(size)]
