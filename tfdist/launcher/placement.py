"""Assigns ranks to nodes, and free ports to servers that start later."""

import contextlib
import dataclasses
import random
import socket

from tfdist.coordination import Group
from tfdist.coordination.job_token import LOOPBACK, join_address, network_interface, route_to, split_address
from tfdist.errors import InputError

# Below the range for outgoing connections on Linux and other systems, so that none of them takes the port meanwhile.
CANDIDATES = range(20000, 32000)


def free_ports(count: int, host: str) -> list[int]:
    """Returns ports on which no program listens on this host.

    All are bound at the same time during the search, so that they are distinct. The choice does not depend on the program's
    random seed, with which two programs would choose the same ports.

    Args:
      count: number of ports.
      host: address that the servers will listen on.

    Raises:
      InputError: there are not enough free ports.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as sockets:
        for port in random.SystemRandom().sample(CANDIDATES, len(CANDIDATES)):
            if len(ports) == count:
                break
            sock = sockets.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            try:
                sock.bind((host, port))
            except OSError:  # in use
                sock.close()
                continue
            ports.append(port)
    if len(ports) < count:
        raise InputError(f"Each of {count} processes needs a free port. Received: {len(ports)} on {host}.")
    return ports


@dataclasses.dataclass(frozen=True)
class Rank:
    """The ranks and sizes of one process: global, within its node, and across the nodes that have its local rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


@dataclasses.dataclass(frozen=True)
class Placement:
    """The placement of all ranks of a job; those of a node are consecutive, in the order of nodes.

    Attributes:
      node: index of this node.
      hosts: by node, the address at which the other nodes reach it.
      ports: by node, a free port for each of its ranks.
      servers: number of ranks that are parameter servers, the last ones.
    """

    node: int
    hosts: tuple[str, ...]
    ports: tuple[tuple[int, ...], ...]
    servers: int = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.ports))

    @property
    def addresses(self) -> tuple[str, ...]:
        """`host:port` for each rank's server, by rank."""
        nodes = zip(self.hosts, self.ports, strict=True)
        return tuple(join_address(host, port) for host, ports in nodes for port in ports)

    @property
    def interface(self) -> str:
        """The network interface through which this node reaches the others.

        Determined by the route to another node, because a host's own name often resolves to its loopback address.
        """
        another = self.hosts[0 if self.node else -1]
        return network_interface(LOOPBACK if len(self.hosts) == 1 else route_to(another).own)

    def ranks(self) -> list[Rank]:
        """Returns the ranks of this node."""
        counts = [len(ports) for ports in self.ports]
        local_size = counts[self.node]
        return [
            Rank(
                rank=sum(counts[: self.node]) + local,
                size=self.size,
                local_rank=local,
                local_size=local_size,
                cross_rank=sum(count > local for count in counts[: self.node]),
                cross_size=sum(count > local for count in counts),
            )
            for local in range(local_size)
        ]


def place_processes(processes: int, host: str, launchers: Group, servers: int = 0) -> Placement:
    """Finds free ports on each node, and exchanges them between all launchers.

    Args:
      processes: number of ranks of this node.
      host: address at which the other nodes reach this one.
      launchers: group of the launchers of all nodes.
      servers: number of ranks that are parameter servers.
    """
    ports = free_ports(processes, host if launchers.size == 1 else "")
    nodes = launchers.gather("launch/places", [host, ports])
    hosts, port_lists = (tuple(values) for values in zip(*nodes, strict=True))
    return Placement(launchers.rank, hosts, tuple(map(tuple, port_lists)), servers)


def own_host(coordinator: str, serves: bool) -> str:
    """Returns the address at which other hosts reach this one.

    On the coordinator's host, this is the coordinator's name; elsewhere, the local address of the route to it.

    Args:
      coordinator: `host:port`; empty for a single host.
      serves: whether this is the coordinator's host.
    """
    if not coordinator:
        return LOOPBACK
    host, port = split_address(coordinator)
    return host if serves else route_to(host, port).own
