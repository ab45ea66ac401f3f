"""Reaching the process that serves a group, which may not be there yet."""

import socket
import time
from typing import NamedTuple

from tfdist.coordination.addresses import split_address
from tfdist.coordination.messages import BadMessage, Lines, Message, encode
from tfdist.errors import InputError, PeerLostError

RETRY_SECONDS = 0.1
_CHUNK = 1 << 16


class Call(NamedTuple):
    """A connection whose hello was answered by a welcome."""

    sock: socket.socket
    lines: Lines
    welcome: Message
    following: list[Message]  # what came right behind the welcome


def connect(address: str, hello: Message, limit: int, timeout: float, server: str) -> Call:
    """Connects and says hello, again and again until somebody answers.

    Args:
      address: `host:port`.
      hello: the first message.
      limit: bytes a message of the server may have.
      timeout: in seconds, for all of it.
      server: what the other side is called.

    Raises:
      PeerLostError: nobody answered in time.
      InputError: the group refused this process, or it is no group that answers.
    """
    end = time.monotonic() + timeout
    problem = "no answer"
    while (left := end - time.monotonic()) > 0:
        try:
            return _try(address, hello, limit, left)
        except OSError as error:
            problem = error.strerror or str(error)
        time.sleep(min(RETRY_SECONDS, max(0.0, end - time.monotonic())))
    raise PeerLostError(f"{server} did not answer at {address} within {timeout:g} s ({problem}).")


def _try(address: str, hello: Message, limit: int, left: float) -> Call:
    sock = socket.create_connection(split_address(address), timeout=left)
    try:
        if sock.getsockname() == sock.getpeername():  # a port without a listener can be connected to itself
            raise ConnectionRefusedError("Connection refused")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(encode(hello))
        lines = Lines(limit)
        first, *following = _first_messages(sock, lines)
        if first["type"] == "refused":
            raise InputError(str(first["reason"]))
        if first["type"] != "welcome":
            raise BadMessage(f"{first['type']!r} for a welcome")
        return Call(sock, lines, first, following)
    except BadMessage as error:
        sock.close()
        raise InputError(
            f"A group of tfdist must answer at {address}. Received: {error}. Another program listens there: choose "
            "another address by TFDIST_COORDINATOR, the same for every process."
        ) from error
    except BaseException:
        sock.close()
        raise


def _first_messages(sock: socket.socket, lines: Lines) -> list[Message]:
    while True:
        data = sock.recv(_CHUNK)
        if not data:
            raise ConnectionResetError("it closed the connection")
        if messages := list(lines.feed(data)):
            return messages
