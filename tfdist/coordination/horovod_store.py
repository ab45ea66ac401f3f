"""Horovod's rendezvous server, which stores the addresses of ranks. Its clients are not authenticated."""

import contextlib
import errno
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from http.server import HTTPServer

MAX_VALUE_BYTES = 1 << 20
MAX_NAME_LENGTH = 256  # characters of a scope or a key


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

    class Handler(RendezvousHandler):
        def do_PUT(self) -> None:
            if not self._has_names():
                return
            size = self.headers.get("Content-Length", "")
            if not size.isdecimal() or len(size) > 9 or int(size) > MAX_VALUE_BYTES:
                self.send_status_code(413)
                return
            super().do_PUT()

        def do_GET(self) -> None:
            if self._has_names():
                super().do_GET()

        def do_HEAD(self) -> None:
            """Rejects the request; the base class would serve files of the working directory."""
            self.send_status_code(405)

        def do_DELETE(self) -> None:
            if self._has_names():
                super().do_DELETE()

        def _has_names(self) -> bool:
            """Returns whether the path is /SCOPE/KEY; otherwise sends an error."""
            names = self.path.split("/")
            if len(names) == 3 and all(len(name) <= MAX_NAME_LENGTH for name in names):
                return True
            self.send_status_code(400)
            return False

    class Server(RendezvousHTTPServer):
        daemon_threads = True

        def __init__(self, address: tuple[str, int]):
            super().__init__(address, Handler, 0)

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignores errors of connections, because clients are not trusted."""

    try:
        server = Server((host, 0))
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        server = Server(("", 0))
    server.init(slots)
    threading.Thread(target=server.serve_forever, name="horovod-rendezvous", args=(0.05,), daemon=True).start()
    return server


@contextlib.contextmanager
def running_server(host: str, slots: Sequence[Any]) -> Iterator[int]:
    """Yields the port of a rendezvous server that runs until the context exits; see `serve`."""
    server = serve(host, slots)
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
