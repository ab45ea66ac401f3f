"""Free ports for servers that start later."""

import contextlib
import random
import socket

from tfdist.errors import InputError

# Below Linux's and other systems' range for outgoing connections, one of which could take the port meanwhile.
CANDIDATES = range(20000, 32000)


def free_ports(count: int, host: str) -> list[int]:
    """Returns ports that nobody on this host listens on.

    All are held at once while they are sought, so that no two are the same.

    Args:
      count: how many.
      host: the address that the servers will listen on.

    Raises:
      InputError: there are not so many.
    """
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for port in random.sample(CANDIDATES, len(CANDIDATES)):
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
        raise InputError(f"{count} processes need a port each. Received: {len(found)} free ones on {host}.")
    return found
