"""The server's end of one connection: what has arrived, what is still to be sent."""

import selectors
import socket
import time

from tfdist.coordination.messages import LIMIT_BEFORE_HELLO, Lines, Message, encode

_CHUNK = 1 << 16


class Connection:
    """A connection in a selector, which never blocks.

    Attributes:
      rank: the member's number, once it has been welcomed.
      heard: when something last arrived that was listened to, as `time.monotonic()` says it.
      lines: cuts what arrives into messages.
      peer: the other end's address, for logs.
      ending: whether the last message has been queued: what still arrives is thrown away.
      closed: whether the socket is closed.
    """

    def __init__(self, sock: socket.socket, peer: str, selector: selectors.BaseSelector):
        """Takes the socket over and registers it, with itself as the key's data."""
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.rank: int | None = None
        self.heard = time.monotonic()
        self.lines = Lines(LIMIT_BEFORE_HELLO)
        self.peer = peer
        self.ending = False
        self.closed = False
        self._sock, self._selector = sock, selector
        self._out = bytearray()
        selector.register(sock, selectors.EVENT_READ, self)

    def receive(self) -> bytes | None:
        """Returns what has arrived, or None at the end of the connection."""
        try:
            data = self._sock.recv(_CHUNK)
        except BlockingIOError:
            return b""
        except OSError:  # reset: an end like another
            return None
        if not self.ending:
            self.heard = time.monotonic()
        return data or None

    def send(self, message: Message) -> None:
        """Queues a message and sends what the other end takes at once."""
        if not self.ending:
            self._out += encode(message)
            self.flush()

    def end(self) -> None:
        """Lets what is queued be sent, and closes when the other end has closed too.

        Closing at once would reset the connection under a message that arrives meanwhile, and the last one we sent
        could be lost with it.
        """
        self.ending = True
        self.flush()

    def flush(self) -> None:
        """Sends what the other end takes without waiting."""
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
            self._out.clear()  # reading tells of the end
        waiting = selectors.EVENT_WRITE if self._out else 0
        self._selector.modify(self._sock, selectors.EVENT_READ | waiting, self)

    def close(self) -> None:
        """Closes at once."""
        if not self.closed:
            self.closed = True
            self._selector.unregister(self._sock)
            self._sock.close()
