"""Horovod's rendezvous server, which stores the addresses of ranks. Its clients are not authenticated."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from http.server import HTTPServer


def serve(host: str, slots: Sequence[Any]) -> "HTTPServer":
    """Serves the rendezvous of a job, in threads of this process, until the server is shut down or the process ends.

    Args:
      host: address to listen on, at which the ranks reach this host; a gateway's address makes it listen on all interfaces.
      slots: the ranks, as returned by `horovod.runner.common.util.hosts.get_host_assignments`.

    Returns:
      The server, whose `server_port` is the port.

    Raises:
      ImportError: Horovod is not installed.
    """
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    class Server(RendezvousHTTPServer):
        daemon_threads = True

        def __init__(self, address: tuple[str, int]):
            super().__init__(address, RendezvousHandler, 0)

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignores errors of connections, such as those of ranks that end."""

    try:
        server = Server((host, 0))
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        server = Server(("", 0))
    server.init(slots)
    threading.Thread(target=server.serve_forever, name="horovod-rendezvous", args=(0.05,), daemon=True).start()
    return server


def gloo_variables(host: str, port: int, find_interface: Callable[[], str]) -> dict[str, str]:
    """Returns the environment variables for Gloo: its server at `host`, and the network interface of this rank."""
    variables = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": host,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    interface = os.environ.get("HOROVOD_GLOO_IFACE") or find_interface()
    return variables | ({"HOROVOD_GLOO_IFACE": interface} if interface else {})  # otherwise Gloo chooses


@contextlib.contextmanager
def running_server(host: str, slots: Sequence[Any]) -> Iterator[int]:
    """Yields the port of a rendezvous server that runs until the context exits; see `serve`."""
    server = serve(host, slots)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
