"""Connects to the process that serves a group, which may not have started yet."""

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tfdist.coordination.addresses import split_address
from tfdist.coordination.authentication import OVERHEAD, Session, WrongSealError, nonce
from tfdist.coordination.handshake import WRONG_TOKEN
from tfdist.coordination.messages import LONGEST_DEADLINE, BadMessage, Message, MessageReader, encode, printable, take
from tfdist.errors import InputError, PeerLostError

RETRY_SECONDS = 0.1
_CHUNK = 1 << 16


class AcceptedConnection(NamedTuple):
    """An open connection between two ends that know the same token; what is sent must be sealed."""

    sock: socket.socket
    lines: MessageReader
    seal: Callable[[bytes], bytes]
    welcome: Message
    following: list[Message]  # messages received together with the welcome


def connect(
    address: str,
    hello: Message,
    token: str,
    limit: int,
    timeout: float,
    server: str,
    seconds: Sequence[str] = (),
    texts: Sequence[str] = (),
) -> AcceptedConnection:
    """Connects and joins, retrying until the server answers.

    Args:
      address: `host:port` of the server.
      hello: the first message, without its nonce.
      token: the token that both ends must know.
      limit: maximum size of a message from the server, in bytes.
      timeout: total seconds to wait.
      server: name of the server in error messages.
      seconds: names of the welcome's fields that are positive numbers of seconds.
      texts: names of its fields that are strings.

    Raises:
      PeerLostError: no server answered in time.
      InputError: the group refused this process, or another program answered.
    """
    end = time.monotonic() + timeout
    problem = "no answer"
    while time.monotonic() < end:
        try:
            return _try(address, hello, token, limit, end, seconds, texts)
        except OSError as error:
            problem = error.strerror or str(error)
        time.sleep(min(RETRY_SECONDS, max(0.0, end - time.monotonic())))
    raise PeerLostError(f"{server} did not answer at {address} within {timeout:g} s ({problem}).")


def _try(
    address: str, hello: Message, token: str, limit: int, end: float, seconds: Sequence[str], texts: Sequence[str]
) -> AcceptedConnection:
    sock = socket.create_connection(split_address(address), timeout=max(end - time.monotonic(), RETRY_SECONDS))
    try:
        if sock.getsockname() == sock.getpeername():  # TCP can connect a port without a listener to itself
            raise ConnectionRefusedError("Connection refused")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        greeting, lines = encode(hello | {"nonce": nonce()}), MessageReader(limit + OVERHEAD)
        sock.sendall(greeting)
        _expect(next_message(sock, lines, end), "challenge")
        session = Session(token, greeting[:-1], lines.line, is_server=False)
        lines.unseal = session.unseal
        sock.sendall(session.seal(encode({"type": "join"})))
        welcome = _expect(next_message(sock, lines, end), "welcome")
        take(welcome, **dict.fromkeys(texts, str))
        for number in take(welcome, **dict.fromkeys(seconds, (int, float))):
            if not 0 < number <= LONGEST_DEADLINE:
                raise BadMessage(f"a welcome with {number!r:.80} seconds")
        return AcceptedConnection(sock, lines, session.seal, welcome, list(lines.feed(b"")))
    except WrongSealError as error:
        sock.close()
        raise InputError(WRONG_TOKEN) from error
    except BadMessage as error:
        sock.close()
        raise InputError(
            f"A group of tfdist must answer at {address}. Received: {error}. Another program listens there: set "
            "TFDIST_COORDINATOR to another address, the same for every process."
        ) from error
    except BaseException:
        sock.close()
        raise


def _expect(message: Message, kind: str) -> Message:
    if message["type"] == "refused":
        raise InputError(printable(str(message.get("reason")), 1000))
    if message["type"] != kind:
        raise BadMessage(f"{message['type']!r:.80} instead of a {kind}")
    return message


def send_or_shut(sock: socket.socket, seal: Callable[[bytes], bytes], line: bytes) -> None:
    """Seals and sends a message; shuts the connection down if that fails or is interrupted, as by Ctrl-C.

    The seal has its number, and parts of it may have been sent: the other end would refuse every later message.
    """
    try:
        sock.sendall(seal(line))
    except BaseException:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        raise


def next_message(sock: socket.socket, lines: MessageReader, end: float) -> Message:
    """Returns the next message, and no more: the one after it may be sealed.

    Args:
      sock: a connected socket.
      lines: reads its messages.
      end: when to give up, by `time.monotonic()`, however slowly the message arrives.

    Raises:
      OSError: it did not arrive in time, or the connection was closed.
      BadMessage: it is none.
    """
    for message in lines.feed(b""):
        return message
    while (left := end - time.monotonic()) > 0:
        sock.settimeout(left)
        data = sock.recv(_CHUNK)
        for message in lines.feed(data):
            return message
        if not data:
            raise ConnectionResetError("it closed the connection")
    raise TimeoutError("timed out")
