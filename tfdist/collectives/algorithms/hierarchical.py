"""All-reduce inside hosts and between them."""

import tensorflow as tf

from tfdist.cluster.topology import Topology
from tfdist.collectives.algorithms.messages import padded
from tfdist.collectives.interface import Collectives


def hierarchical(collectives: Collectives, vector: tf.Tensor, topology: Topology, name: str) -> tf.Tensor:
    """Sums a vector inside each host, between hosts, and returns it inside each host.

    With L replicas on each of H hosts, a reduce-scatter leaves each replica with the host's sum of one of L parts; the
    replicas with the same part, one per host, sum it; an all-gather inside the host joins the parts.

    Steps: those of the engine's reduce-scatter, all-reduce and all-gather. Sent by a host to others: 2 n (H - 1) / H, by each
    of its replicas 1 / L of it. A ring in rank order sends 2 n (N - 1) / N from each host to the next, so that this is
    0.67 of it on 2 x 2 replicas. For hosts between which links are slower than inside.

    Where hosts have different numbers of replicas, the first one of each host has the host's sum (an all-reduce inside),
    sums it with the other first ones, and broadcasts it inside.

    Horovod's HOROVOD_HIERARCHICAL_ALLREDUCE: Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in
    TensorFlow", 2018.
    """
    rank = collectives.static_rank
    mine = topology.ranks_of(topology.host_of[rank])
    inside = collectives.group(mine)
    if not _is_even(topology):
        [total] = inside.all_reduce([vector], name=f"{name}/inside")
        if rank == mine[0]:
            [total] = collectives.group(_leaders(topology)).all_reduce([total], name=f"{name}/between")
        [total] = inside.broadcast([total], name=f"{name}/return")
        return total
    [part] = inside.reduce_scatter([padded(vector, len(mine))], name=f"{name}/inside")
    between = [topology.ranks_of(host)[mine.index(rank)] for host in range(topology.hosts)]
    [part] = collectives.group(between).all_reduce([part], name=f"{name}/between")
    [whole] = inside.all_gather([part], name=f"{name}/return")
    return tf.ensure_shape(whole, [part.shape[0] * len(mine)])[: vector.shape[0]]


def groups(topology: Topology) -> list[tuple[int, ...]]:
    """Returns the replicas of each host, and those that communicate between hosts."""
    inside = [tuple(topology.ranks_of(host)) for host in range(topology.hosts)]
    return [*inside, *(zip(*inside, strict=True) if _is_even(topology) else [tuple(_leaders(topology))])]


def _is_even(topology: Topology) -> bool:
    return len({len(topology.ranks_of(host)) for host in range(topology.hosts)}) == 1


def _leaders(topology: Topology) -> list[int]:
    return [topology.ranks_of(host)[0] for host in range(topology.hosts)]
