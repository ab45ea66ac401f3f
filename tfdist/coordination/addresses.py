"""Where a group is found: `host:port`, as text, as a listening socket, and as the way there."""

import errno
import ipaddress
import socket
from typing import NamedTuple

import psutil

from tfdist.errors import InputError

LOOPBACK = "127.0.0.1"


def split_address(address: str) -> tuple[str, int]:
    """Returns the host, without an IPv6 address's brackets, and the port of `host:port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join_address(host: str, port: int) -> str:
    """Returns `host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listen(address: str, remedy: str) -> socket.socket:
    """Binds where the group is to be found, to that interface alone if this host knows it; port 0 takes a free one.

    A name that stands for the loopback here (as Debian writes into /etc/hosts) or for an address that is not on this
    host (behind a translating router) is meant for others: then every interface listens.

    Raises:
      InputError: the port is in use, or the name is not known; it ends with `remedy`.
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


class Way(NamedTuple):
    """From this host to another one: the addresses at both ends, the first of which this host has."""

    own: str
    other: str


def way_to(host: str, port: int = 1, family: int = socket.AF_UNSPEC) -> Way:
    """Finds the way to a host by its name or its address; sends nothing.

    Args:
      host: the name or the address.
      port: any.
      family: `socket.AF_INET` for an engine that knows no other.

    Raises:
      OSError: the name is not known, or there is no way.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, family, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return Way(str(probe.getsockname()[0]), str(probe.getpeername()[0]))


def is_loopback(address: str) -> bool:
    """Whether no other host reaches an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def network_interface(address: str) -> str:
    """The name of this host's network interface that has an address; empty if none has."""
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
