"""The algorithms by name."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import tensorflow as tf

from tfdist.cluster.topology import Topology
from tfdist.collectives.algorithms import halving_doubling, hierarchical, ring, tree
from tfdist.collectives.interface import Collectives


class Algorithm(NamedTuple):
    """A way to sum a vector over all replicas.

    Attributes:
      sum: takes the collectives of all replicas, this replica's vector, the places of the replicas, and a name; returns the
        sum, with the same bits on every replica.
      groups: returns the groups of ranks that communicate; some occur more than once.
    """

    sum: Callable[[Collectives, tf.Tensor, Topology, str], tf.Tensor]
    groups: Callable[[Topology], list[tuple[int, ...]]]


CATALOG: Mapping[str, Algorithm] = {
    "ring": Algorithm(ring.ring, ring.groups),
    "tree": Algorithm(tree.tree, tree.groups),
    "halving_doubling": Algorithm(halving_doubling.halving_doubling, halving_doubling.groups),
    "hierarchical": Algorithm(hierarchical.hierarchical, hierarchical.groups),
}


def groups_of(names: Iterable[str], topology: Topology) -> list[tuple[int, ...]]:
    """Returns the groups of ranks that some algorithms need, in the same order on every process; names may be other words."""
    wanted = {group for name in names if name in CATALOG for group in CATALOG[name].groups(topology)}
    return sorted(group for group in wanted if len(group) > 1)
