"""One process with one replica, without tf.distribute: the reference for all other strategies."""

from collections.abc import Callable

from tfdist.cluster.environment import Cluster
from tfdist.collectives import OneReplica
from tfdist.coordination import Group
from tfdist.distribution.strategy import Strategy


class Single(Strategy):
    """Runs a replica function by calling it."""

    name = "single"
    replicas = 1
    local_replicas = range(1)

    def __init__(self, *, cluster: Cluster, join: Callable[[Cluster], Group]):
        """Joins the group.

        Args:
          cluster: a cluster of one process.
          join: creates its group.
        """
        self.cluster = cluster
        self.group = join(cluster)
        self.collectives = OneReplica()


STRATEGY = Single
