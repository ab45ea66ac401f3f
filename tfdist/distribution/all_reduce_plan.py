"""Plans the all-reduces of a job from `--all_reduce` and `--topology`: algorithms, groups of ranks, hosts of replicas."""

import socket
from typing import NamedTuple

from tfdist.cluster.environment import Cluster
from tfdist.cluster.topology import Topology
from tfdist.collectives import Collectives
from tfdist.collectives.all_reduce_algorithms import (
    TunedCollectives,
    check_algorithm,
    groups_of,
    possible_algorithms,
)
from tfdist.config.all_reduce import ENGINE, AlgorithmTable, AllReduce, parse_all_reduce
from tfdist.config.strategy_registry import read_table
from tfdist.coordination import Group
from tfdist.errors import InputError


class AllReducePlan(NamedTuple):
    """The algorithms of a job's all-reduces, the same on every process.

    Attributes:
      choice: value of `--all_reduce`.
      topology: the hosts of the replicas.
      table: the table of algorithms in the file that `choice` names; None if it names no file.
    """

    choice: AllReduce
    topology: Topology
    table: AlgorithmTable | None

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The groups of ranks that communicate. Engines of several processes need them when they start."""
        if self.choice.is_measured:
            return groups_of(possible_algorithms(self.topology), self.topology)
        return groups_of(self.table.algorithms if self.table else (self.choice.name,), self.topology)

    def tune(self, collectives: Collectives) -> TunedCollectives | None:
        """Returns the collectives for training steps; None for the engine's all-reduce or a single replica."""
        if self.choice.name == ENGINE or collectives.size == 1:
            return None
        is_measured = self.choice.is_measured
        table = self.table or (AlgorithmTable() if is_measured else AlgorithmTable.uniform(self.choice.name))
        return TunedCollectives(collectives, self.topology, table, is_measured=is_measured)


def plan_all_reduce(
    all_reduce: str, topology: str, group: Group | None, cluster: Cluster, replicas: int = 0
) -> AllReducePlan:
    """Plans the all-reduces of a job from its flags; every process must call it.

    Args:
      all_reduce: value of `--all_reduce`.
      topology: value of `--topology`; empty for the hosts of the processes.
      group: all processes of the job; None if they cannot communicate yet.
      cluster: this process.
      replicas: number of replicas in the job; 0 for one in each process.

    Raises:
      InputError: the topology does not match the number of replicas, the algorithm does not support these hosts, or the
        file with the table of algorithms is unreadable or differs between processes.
    """
    choice, replicas = parse_all_reduce(all_reduce), replicas or cluster.size
    if topology:
        hosts = Topology.parse(topology, replicas)
    elif choice.name == ENGINE:  # hosts do not matter, and nothing is exchanged
        hosts = Topology((0,) * replicas)
    else:
        hosts = _detect_topology(choice.name, group, cluster, replicas)
    table = None
    if choice.table:
        table = read_table(choice.table)
        if group:
            group.agree("all_reduce/table", {"all_reduce": [list(band) for band in table.bands]}, "table of --")
    for name in table.algorithms if table else (choice.name,):
        check_algorithm(name, hosts)
    return AllReducePlan(choice, hosts, table)


def _detect_topology(algorithm: str, group: Group | None, cluster: Cluster, replicas: int) -> Topology:
    """Returns the topology of the replicas, from the host name and local rank of each process."""
    if group is None:
        if algorithm in ("auto", "hierarchical"):
            raise InputError(
                f"--all_reduce={algorithm} needs the hosts of all processes, which are not known before Horovod has started. "
                f"Received: {cluster.size} processes, {cluster.local_size} of them on this host. Pass --topology, such as 2,1."
            )
        return Topology((0,) * replicas)  # other algorithms do not depend on hosts
    hosts = group.gather("all_reduce/hosts", [socket.gethostname(), cluster.rank - cluster.local_rank])
    local_replicas = replicas // cluster.size
    return Topology.from_host_names([str(host) for host in hosts for _ in range(local_replicas)])
