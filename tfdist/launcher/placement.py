"""Assigns ranks to nodes, and free ports to servers."""

import contextlib
import dataclasses
import random
import socket

from tfdist.coordination import Group
from tfdist.coordination.job_token import LOOPBACK, join_address, network_interface, route_to, split_address
from tfdist.errors import InputError

# Below the range of outgoing connections, which could otherwise take a port before its server starts.
CANDIDATE_PORTS = range(20000, 32000)


def free_ports(count: int, host: str) -> list[int]:
    """Returns distinct free ports on this host, independently of the program's random seed.

    Raises:
      InputError: there are not enough free ports.
    """
    ports: list[int] = []
    with contextlib.ExitStack() as sockets:
        for port in random.SystemRandom().sample(CANDIDATE_PORTS, len(CANDIDATE_PORTS)):
            if len(ports) == count:
                break
            candidate = sockets.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            try:
                candidate.bind((host, port))
            except OSError:  # in use
                candidate.close()
                continue
            ports.append(port)
    if len(ports) < count:
        raise InputError(f"Each of {count} processes needs a free port. Received: {len(ports)} on {host}.")
    return ports


@dataclasses.dataclass(frozen=True)
class Placement:
    """The placement of all ranks of a job; the ranks of a node are consecutive, in the order of nodes.

    Attributes:
      node: index of this node.
      hosts: address at which other nodes reach each node, by node.
      ports: free ports of the ranks of each node, by node.
      servers: number of ranks that are parameter servers; they are the last ones.
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
        """`host:port` of each rank's server, by rank."""
        nodes = zip(self.hosts, self.ports, strict=True)
        return tuple(join_address(host, port) for host, ports in nodes for port in ports)

    @property
    def interface(self) -> str:
        """The network interface through which this node reaches other nodes.

        Derived from the route to another node, because a host name often resolves to the host's loopback address.
        """
        other_host = self.hosts[0 if self.node else -1]
        return network_interface(LOOPBACK if len(self.hosts) == 1 else route_to(other_host).local_address)

    def ranks(self) -> range:
        """Returns the ranks of this node."""
        first = sum(map(len, self.ports[: self.node]))
        return range(first, first + len(self.ports[self.node]))


def place_processes(processes: int, host: str, launchers: Group, servers: int = 0) -> Placement:
    """Finds free ports on each node, and exchanges them between all launchers."""
    ports = free_ports(processes, host if launchers.size == 1 else "")
    nodes = launchers.gather("launch/places", [host, ports])
    hosts, port_lists = (tuple(values) for values in zip(*nodes, strict=True))
    return Placement(launchers.rank, hosts, tuple(map(tuple, port_lists)), servers)


def reachable_address(coordinator: str, serves: bool) -> str:
    """Returns the address at which other hosts reach this host.

    On the coordinator's host (`serves`), this is the coordinator's name; on other hosts, the local address of the route to it.
    """
    if not coordinator:
        return LOOPBACK
    host, port = split_address(coordinator)
    return host if serves else route_to(host, port).local_address
