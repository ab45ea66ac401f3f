"""Connections of tests that speak the protocol by hand, with a token or without."""

import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any

from tests.waiting import DEADLINE
from tfdist.coordination.job_token import split_address
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
