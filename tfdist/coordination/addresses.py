"""Addresses of a group: parsing `host:port`, listening sockets, and routes to other hosts."""

import errno
import ipaddress
import socket
from typing import NamedTuple

import psutil

from tfdist.errors import InputError

LOOPBACK = "127.0.0.1"
NO_RESOURCES = (
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
)  # for another connection, in this process or host


def split_address(address: str) -> tuple[str, int]:
    """Splits `host:port` into the host, without the brackets of an IPv6 address, and the port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_port() -> int:
    """Returns a port that no program of this host listens at; another one may take it before it is used."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def listen(address: str, remedy: str) -> socket.socket:
    """Opens the listening socket of a group.

    Binds only the interface that `address` names, if this host has it. All interfaces are bound if the name resolves to
    the loopback (Debian writes such entries into /etc/hosts) or to an address that this host does not have (behind a
    NAT router), because the other hosts use that name.

    Args:
      address: `host:port`; port 0 chooses a free port.
      remedy: last sentence of the error message.

    Raises:
      InputError: the port is in use, or the name cannot be resolved.
    """
    host, port = split_address(address)
    try:
        try:
            return _bind(_interface(host), port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return _bind("", port)
    except OSError as error:
        says = "port in use" if error.errno == errno.EADDRINUSE else error.strerror or error
        raise InputError(f"The group must be served at {address}. Received: {says}. {remedy}") from error


class Route(NamedTuple):
    """The local and remote address of a route from this host to another one.

    Attributes:
      own: the address of this host.
      other: the address of the other host.
    """

    own: str
    other: str


def route_to(host: str, port: int = 1, family: int = socket.AF_UNSPEC) -> Route:
    """Finds the route to a host, without sending anything.

    Args:
      host: host name or IP address.
      port: any port.
      family: `socket.AF_INET` for an engine that supports IPv4 only.

    Raises:
      OSError: the name cannot be resolved, or there is no route.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return Route(str(probe.getsockname()[0]), str(probe.getpeername()[0]))


def is_loopback(address: str) -> bool:
    """Returns whether an address is a loopback address, which no other host can reach."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def network_interface(address: str) -> str:
    """Returns the name of this host's network interface with the given address, or "" if there is none."""
    for name, held in psutil.net_if_addrs().items():
        if address.partition("%")[0] in {one.address.partition("%")[0] for one in held}:
            return name
    return ""


def _interface(host: str) -> str:
    found = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return "" if is_loopback(found) and host not in (found, "localhost") else found


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=512)
