"""Connections of tests that speak the protocol by hand, with a token or without, and those on their path."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.waiting import DEADLINE
from tfdist.coordination.job_token import join_address, split_address
from tfdist.coordination.messages import Session, encode

HELLO = {"type": "hello", "rank": 0, "size": 2, "pid": 1, "host": "h", "nonce": "n"}
GATHER = {"type": "gather", "ranks": None, "ticket": 1, "name": "y", "value": 1, "deadline": 1, "place": ""}


def drip(sock: socket.socket, until: Callable[[], object] = lambda: False) -> None:
    """Sends bytes that never make a message, until a condition is met or the other end closes the connection."""
    end = time.monotonic() + DEADLINE
    with contextlib.suppress(OSError):
        while not until() and time.monotonic() < end:
            sock.sendall(b"x")
            time.sleep(0.05)


class Wire:
    """A connection to a server."""

    def __init__(self, address: str, hello: dict[str, Any] | None = None, token: str = "the job's token"):
        """Connects, and joins if there is a hello."""
        self.sock = socket.create_connection(split_address(address), timeout=DEADLINE)
        self._file = self.sock.makefile("rb")
        self.lines = (line[:-1] for line in self._file)
        self.session: Session | None = None
        if hello:
            greeting = encode(hello)
            self.sock.sendall(greeting)
            challenge = next(self.lines)
            self.session = Session(token, greeting[:-1], challenge, is_server=False)
            self.send({"type": "join"})

    def send(self, message: dict[str, Any]) -> None:
        self.sock.sendall(self.sealed(message))

    def sealed(self, message: dict[str, Any]) -> bytes:
        assert self.session
        return self.session.seal(encode(message))

    def receive(self) -> dict[str, Any]:
        """The next message; its seal must be right."""
        assert self.session
        return json.loads(self.session.unseal(next(self.lines)))

    def rest(self) -> list[bytes]:
        """What comes until the server closes the connection, after this end has finished."""
        self.sock.shutdown(socket.SHUT_WR)
        return list(self.lines)

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self.sock.close()


Change = Callable[[int, bytes], bytes]


def as_it_is(number: int, piece: bytes) -> bytes:
    return piece


class Between:
    """Someone on the path of connections to a server, who reads and changes what is sent.

    Attributes:
      address: address for the clients.
      seen: for each connection, the pieces from the client and those from the server.
      to_server: returns what the server gets for a piece from a client, given the number of the piece, too.
      to_client: the same in the other direction.
    """

    def __init__(self, address: str, to_server: Change = as_it_is, to_client: Change = as_it_is, by_line: bool = True):
        self._server, self._by_line = split_address(address), by_line
        self.to_server, self.to_client = to_server, to_client
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = join_address(*self._listener.getsockname()[:2])
        self.seen: list[tuple[list[bytes], list[bytes]]] = []
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                self._ends += client, server
                self.seen.append(([], []))
                self._start(self._forward, client, server, self.seen[-1][0], "to_server")
                self._start(self._forward, server, client, self.seen[-1][1], "to_client")

    def _forward(self, source: socket.socket, target: socket.socket, seen: list[bytes], way: str) -> None:
        with contextlib.suppress(OSError), source.makefile("rb") as lines:
            for number, piece in enumerate(lines if self._by_line else iter(lambda: source.recv(1 << 20), b"")):
                seen.append(piece)
                target.sendall(getattr(self, way)(number, piece))
        self._cut(source, target)

    def _cut(self, *ends: socket.socket) -> None:
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._cut(self._listener, *self._ends)
        for thread in self._threads:
            thread.join(DEADLINE)
        for end in (self._listener, *self._ends):
            end.close()
