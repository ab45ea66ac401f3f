"""The server's end of one connection, with its receive and send buffers."""

import selectors
import socket
import time

from tfdist.coordination.authentication import OVERHEAD, Session, challenged
from tfdist.coordination.messages import LIMIT, LIMIT_BEFORE_HELLO, Message, MessageReader, encode

_CHUNK = 1 << 16


class Connection:
    """A non-blocking connection that is registered with a selector.

    Attributes:
      rank: the member's rank, after it has been welcomed.
      hello: the message that has been answered by a challenge; None before.
      accepted: `time.monotonic()` when the connection was accepted.
      heard: `time.monotonic()` when the last message was received, complete and verified, not counting those after `end`.
      lines: splits the received data into messages.
      peer: address of the other end, for logs.
      ending: whether the last message has been queued; data received afterwards is discarded.
      closed: whether the socket is closed.
    """

    def __init__(self, sock: socket.socket, peer: str, selector: selectors.BaseSelector):
        """Takes ownership of the socket and registers it, with this object as the key's data."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank: int | None = None
        self.hello: Message | None = None
        self._session: Session | None = None
        self.accepted = self.heard = time.monotonic()
        self.lines = MessageReader(LIMIT_BEFORE_HELLO)
        self.peer = peer
        self.ending = False
        self.closed = False
        self._sock, self._selector = sock, selector
        self._out = bytearray()
        selector.register(sock, selectors.EVENT_READ, self)

    @property
    def unread(self) -> int:
        """Number of bytes that the other end has not received yet."""
        return len(self._out)

    def receive(self) -> bytes | None:
        """Returns the data received, or None at the end of the connection."""
        try:
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return b""
        except OSError:  # reset by the peer: treated as a normal end
            return None
        return data or None

    def send(self, message: Message) -> None:
        """Queues a message and sends as much as possible without blocking."""
        if not self.ending:
            line = encode(message)
            self._out += self._session.seal(line) if self._session else line
            self.flush()

    def challenge(self, hello: Message, token: str) -> None:
        """Answers a hello, the last message read; from now on messages must be sealed with the token."""
        challenge, session = challenged(token, self.lines.line)
        self.send(challenge)
        self.hello, self._session = hello, session
        self.lines.unseal, self.lines.limit = session.unseal, LIMIT_BEFORE_HELLO + OVERHEAD

    def refuse(self, reason: str, *, sealed: bool = True) -> None:
        """Sends a refusal and ends; without a seal to an end that does not know the token."""
        if not sealed:
            self._session = None
        self.send({"type": "refused", "reason": reason})
        self.end()

    def admit(self, rank: int) -> None:
        """Sets the rank of the member at the other end."""
        self.rank, self.lines.limit = rank, LIMIT + OVERHEAD

    def end(self) -> None:
        """Sends the queued data, and closes once the other end has closed too.

        Closing at once would reset the connection if a message is still arriving, and the last message sent could be
        lost.
        """
        self.ending = True
        self.flush()

    def flush(self) -> None:
        """Sends as much of the queued data as possible without blocking."""
        if self.closed:
            return
        try:
            while self._out:
                del self._out[: self._sock.send(self._out)]
            if self.ending:
                self._sock.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()  # the next receive detects the end
        waiting = selectors.EVENT_WRITE if self._out else 0
        self._selector.modify(self._sock, selectors.EVENT_READ | waiting, self)

    def close(self) -> None:
        """Closes the connection immediately."""
        if not self.closed:
            self.closed = True
            self._selector.unregister(self._sock)
            self._sock.close()
