"""Finds free ports for servers that start later."""

import contextlib
import random
import socket

from tfdist.errors import InputError

# Below the range for outgoing connections on Linux and other systems, so that none of those takes the port meanwhile.
CANDIDATES = range(20000, 32000)


def free_ports(count: int, host: str) -> list[int]:
    """Returns ports on which nothing listens on this host.

    All are bound at the same time during the search, so that they are distinct. The choice depends on no seed of the program:
    two programs with the same one would choose the same ports.

    Args:
      count: number of ports.
      host: address that the servers will listen on.

    Raises:
      InputError: there are not enough free ports.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.SystemRandom().sample(CANDIDATES, len(CANDIDATES)):
            if len(found) == count:
                break
            sock = held.enter_context(socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET))
            try:
                sock.bind((host, port))
            except OSError:  # in use
                sock.close()
                continue
            found.append(port)
    if len(found) < count:
        raise InputError(f"Each of {count} processes needs a free port. Received: {len(found)} on {host}.")
    return found
