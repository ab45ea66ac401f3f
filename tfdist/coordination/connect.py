"""Connects to the process that serves a group, which may not have started yet."""

import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from tfdist.coordination.addresses import split_address
from tfdist.coordination.messages import LONGEST_DEADLINE, BadMessage, Message, MessageReader, encode, take
from tfdist.errors import InputError, PeerLostError

RETRY_SECONDS = 0.1
_CHUNK = 1 << 16


class AcceptedConnection(NamedTuple):
    """An open connection that the server has welcomed."""

    sock: socket.socket
    lines: MessageReader
    welcome: Message
    following: list[Message]  # messages received together with the welcome


def connect(
    address: str, hello: Message, limit: int, timeout: float, server: str, seconds: Sequence[str] = ()
) -> AcceptedConnection:
    """Connects and sends the hello, retrying until the server answers.

    Args:
      address: `host:port` of the server.
      hello: the first message.
      limit: maximum size of a message from the server, in bytes.
      timeout: total seconds to wait.
      server: name of the server in error messages.
      seconds: names of the welcome's fields that are positive numbers of seconds.

    Raises:
      PeerLostError: no server answered in time.
      InputError: the group refused this process, or another program answered.
    """
    end = time.monotonic() + timeout
    problem = "no answer"
    while (left := end - time.monotonic()) > 0:
        try:
            return _try(address, hello, limit, left, seconds)
        except OSError as error:
            problem = error.strerror or str(error)
        time.sleep(min(RETRY_SECONDS, max(0.0, end - time.monotonic())))
    raise PeerLostError(f"{server} did not answer at {address} within {timeout:g} s ({problem}).")


def _try(address: str, hello: Message, limit: int, left: float, seconds: Sequence[str]) -> AcceptedConnection:
    sock = socket.create_connection(split_address(address), timeout=left)
    try:
        if sock.getsockname() == sock.getpeername():  # TCP can connect a port without a listener to itself
            raise ConnectionRefusedError("Connection refused")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(encode(hello))
        lines = MessageReader(limit)
        first, *following = _first_messages(sock, lines)
        if first["type"] == "refused":
            raise InputError(str(first["reason"]))
        if first["type"] != "welcome":
            raise BadMessage(f"{first['type']!r} instead of a welcome")
        for number in take(first, **dict.fromkeys(seconds, (int, float))):
            if not 0 < number <= LONGEST_DEADLINE:
                raise BadMessage(f"a welcome with {number!r:.80} seconds")
        return AcceptedConnection(sock, lines, first, following)
    except BadMessage as error:
        sock.close()
        raise InputError(
            f"A group of tfdist must answer at {address}. Received: {error}. Another program listens there: set "
            "TFDIST_COORDINATOR to another address, the same for every process."
        ) from error
    except BaseException:
        sock.close()
        raise


def _first_messages(sock: socket.socket, lines: MessageReader) -> list[Message]:
    while True:
        data = sock.recv(_CHUNK)
        if not data:
            raise ConnectionResetError("it closed the connection")
        if messages := list(lines.feed(data)):
            return messages
