"""Remote procedure calls over TCP, with JSON values and arrays, for launchers and parameter servers.

When a connection opens, each end sends a nonce. Both ends derive keys from the nonces and the server's token, which is never
sent, and each end proves that it has the keys. A message consists of the length of its header (8 bytes, little-endian), the
header as a line of JSON with its MAC, and the bytes of the arrays, each aligned for TensorFlow. Arrays are sent and received
without copying them in memory. gRPC for Python takes five times as long.

The MAC also covers the index of the message in its connection, so that a repeated, omitted or altered message ends the
connection. The header contains the dtypes and shapes, and a digest of the first 64 KiB of the arrays. Hashing all bytes would
add a fifth to the time of a large message.
"""

import collections
import contextlib
import hashlib
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tfdist.coordination.job_token import split_address
from tfdist.coordination.messages import HELLO_SECONDS, OVERHEAD, Session, WrongSealError
from tfdist.errors import PeerLostError

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 256 << 20
_DIGESTED_BYTES = 64 << 10
_MAX_BUFFERS = 1024  # per call of sendmsg
ALIGNMENT = 64  # in bytes, as for TensorFlow's tensors
_NONCE_BYTES = 32
_KEEPALIVE_SECONDS = 60
MAX_UNAUTHENTICATED = 1024  # connections; another one closes the oldest
_RETRY_SECONDS = 0.1  # after a connection that could not be accepted
_PROOF = b"\n"  # the first message of each end
_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16)}  # unknown to NumPy
_NOT_A_MESSAGE = (ValueError, KeyError, TypeError, OverflowError, RecursionError, MemoryError)


class Message(NamedTuple):
    """The contents of a call or of its answer.

    Attributes:
      values: JSON values, by name.
      arrays: arrays of any shape; the arrays of a received message share one buffer.
    """

    values: Mapping[str, Any]
    arrays: Sequence[np.ndarray] = ()


def encode(message: Message, title: str = "") -> list[Any]:
    """Serializes a message; returns the header and the buffers of the data, which share the memory of the arrays.

    The title is the name of the method of a call; in an answer, it is the error, if any.
    """
    arrays = [np.asarray(array, order="C") for array in message.arrays]
    array_specs = [(array.dtype.name, array.shape) for array in arrays]
    data = [
        part for array in arrays for part in (array.reshape(-1).view(np.uint8).data, bytes(-array.nbytes % ALIGNMENT))
    ]
    header = {"title": title, "values": message.values, "arrays": array_specs, "digest": _digest(data)}
    return [json.dumps(header).encode() + b"\n", *data]


def decode(header: bytes, receive: Callable[[int], np.ndarray]) -> tuple[str, Message]:
    """Parses the header of a message; returns its title, and the message.

    Args:
      header: the header.
      receive: takes a number of bytes, and returns that many received bytes, which the arrays share as their buffer.

    Raises:
      ValueError: the header or the data is invalid; the other exceptions of `_NOT_A_MESSAGE` mean the same.
    """
    content = json.loads(header)
    specs: list[tuple[np.dtype, list[int], int]] = []
    for name, shape in content["arrays"]:
        dtype = _DTYPES.get(name) or np.dtype(name)
        if dtype.hasobject or any(not isinstance(dim, int) or not 0 <= dim < 1 << 62 for dim in shape):
            raise ValueError(f"an array of {name} {shape}")
        specs.append((dtype, shape, math.prod(shape) * dtype.itemsize))
    title, message = str(content["title"]), Message(content["values"], [])
    data = receive(sum(size + -size % ALIGNMENT for *_, size in specs))
    if _digest([data]) != content["digest"]:
        raise ValueError("data that does not match the digest in the header")
    position, arrays = 0, []
    for dtype, shape, size in specs:
        arrays.append(data[position : position + size].view(dtype).reshape(shape))
        position += size + -size % ALIGNMENT
    return title, message._replace(arrays=arrays)


def _digest(data: Iterable[Any]) -> str:
    digest, remaining = hashlib.sha256(), _DIGESTED_BYTES
    for part in data:
        digest.update(part[:remaining])
        remaining -= min(remaining, len(part))
    return digest.hexdigest()


class _Channel:
    """One end of an authenticated connection.

    Attributes:
      socket: the connection.
      received_bytes: size in bytes of the last message received.
    """

    def __init__(self, connection: socket.socket, token: str, *, is_server: bool):
        """Authenticates both ends.

        Raises:
          WrongSealError: the other end has a different token.
        """
        self.socket, self.received_bytes = connection, 0
        connection.settimeout(HELLO_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # routers forget idle connections
        if hasattr(socket, "TCP_KEEPIDLE"):  # not on all systems
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
        nonce = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(nonce)
        nonces = [nonce, self._receive(_NONCE_BYTES).tobytes()]
        client_nonce, server_nonce = reversed(nonces) if is_server else nonces
        self._session = Session(token, client_nonce, server_nonce, is_server=is_server)
        if not is_server:
            connection.sendall(self._session.seal(_PROOF))
        self._session.unseal(self._receive(OVERHEAD + len(_PROOF)).tobytes().removesuffix(_PROOF))
        if is_server:
            connection.sendall(self._session.seal(_PROOF))
        connection.settimeout(None)

    def __del__(self) -> None:
        """Closes the connection, for example after calls to several servers of which one has failed."""
        self.socket.close()

    def send(self, messages: Iterable[tuple[str, Message]]) -> list[int]:
        """Sends messages with their titles; returns their sizes in bytes."""
        buffers: list[Any] = []
        sizes = []
        for title, message in messages:
            header, *data = encode(message, title)
            sealed = self._session.seal(header)
            frame = [len(sealed).to_bytes(_LENGTH_BYTES, "little"), sealed, *data]
            sizes.append(sum(map(len, frame)))
            buffers += frame
        parts = collections.deque(memoryview(buffer) for buffer in buffers if len(buffer))
        while parts:
            sent = self.socket.sendmsg([parts[i] for i in range(min(len(parts), _MAX_BUFFERS))])
            while parts and sent >= len(parts[0]):
                sent -= len(parts.popleft())
            if sent:
                parts[0] = parts[0][sent:]
        return sizes

    def receive(self) -> tuple[str, Message]:
        """Receives a message; returns its title and the message.

        Raises:
          WrongSealError: the data is not the next message of the other end.
          ValueError: the data is not a message; see `decode`.
        """
        self.received_bytes = 0
        length = int.from_bytes(self._receive(_LENGTH_BYTES).tobytes(), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {length} bytes")
        return decode(self._session.unseal(self._receive(length).tobytes().removesuffix(b"\n")), self._receive)

    def _receive(self, count: int) -> np.ndarray:
        memory = np.empty([count + ALIGNMENT - 1], np.uint8)
        begin = -memory.ctypes.data % ALIGNMENT
        data, position = memory[begin : begin + count], 0
        while position < count:
            received = self.socket.recv_into(data[position:].data, 0, socket.MSG_WAITALL)
            if not received:
                raise ConnectionResetError("the connection was closed")
            position += received
        self.received_bytes += count
        return data


Handler = Callable[[Message], Message]
Call = tuple[str, Message]


class Service:
    """A server of remote procedure calls. Each connection has its own thread, in which calls may block.

    Attributes:
      port: the port on which it listens.
    """

    def __init__(
        self, handlers: Mapping[str, Handler], token: str, listener: socket.socket, idle_seconds: float | None = None
    ):
        """Starts the server.

        Args:
          handlers: functions by method name. An exception in a function fails the call, but not the server.
          token: secret of this server and its clients, different from the tokens of other servers.
          listener: a listening socket; the server closes it.
          idle_seconds: maximum time between two calls of a client; None for no limit.
        """
        self._handlers, self._token, self._idle_seconds = handlers, token, idle_seconds
        self._listener = listener
        self.port: int = listener.getsockname()[1]
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, bool] = {}  # whether they are authenticated; the oldest first
        threading.Thread(target=self._accept, name="calls server", daemon=True).start()

    def handlers_for(self, address: str) -> contextlib.AbstractContextManager[Mapping[str, Handler]]:
        """Returns a context manager that yields the handlers for an authenticated client, and exits when the client leaves.

        If the connection fails, its exception is raised in the context.
        """
        return contextlib.nullcontext(self._handlers)

    def close(self) -> None:
        """Stops the server; pending calls fail."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                _shut_down(connection)

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(_RETRY_SECONDS)  # the client has disconnected, or no file descriptor is free
                continue
            with self._lock:
                unauthenticated = [c for c, is_authenticated in self._connections.items() if not is_authenticated]
                if len(unauthenticated) >= MAX_UNAUTHENTICATED:
                    _shut_down(unauthenticated[0])
                    del self._connections[unauthenticated[0]]
                self._connections[connection] = False
            threading.Thread(target=self._serve, args=[connection, str(address[0])], name="calls", daemon=True).start()

    def _serve(self, connection: socket.socket, address: str) -> None:
        with contextlib.suppress(OSError, WrongSealError):  # the client is lost, or is another program
            channel = _Channel(connection, self._token, is_server=True)
            connection.settimeout(self._idle_seconds)
            with self._lock:
                self._connections[connection] = True
            with self.handlers_for(address) as handlers:
                while self._answer(channel, handlers):
                    pass
        with self._lock:
            self._connections.pop(connection, None)
        connection.close()

    def _answer(self, channel: _Channel, handlers: Mapping[str, Handler]) -> bool:
        """Answers a call; returns whether another one may follow."""
        try:
            method, message = channel.receive()
            handler = handlers[method]
        except WrongSealError:
            raise
        except _NOT_A_MESSAGE as error:
            channel.send([(f"not a call: {error!r}", Message({}))])
            return False
        try:
            answer, failure = handler(message), ""
        except Exception as error:
            answer, failure = Message({}), f"{type(error).__name__}: {error}"
        channel.send([(failure, answer)])
        return not failure  # calls that were sent together depend on each other


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Connection:
    """The connections to one server: as many as there are concurrent calls.

    Attributes:
      name: display name of the server, such as "server 0 (rank 2)".
      pending_method: method whose answer is awaited; "" for none.
      byte_counts: bytes of the messages that were sent and received, by method.
    """

    def __init__(self, address: str, token: str, name: str):
        """Initializes the connection to a server at `host:port`, with the same token; the first call connects."""
        self._address, self._token = split_address(address), token
        self.name, self.pending_method = name, ""
        self.byte_counts: collections.Counter[str] = collections.Counter()
        self._idle: collections.deque[_Channel] = collections.deque()

    def begin(self, calls: Sequence[Call], seconds: float | None = None) -> Callable[[], Iterator[Message]]:
        """Sends calls, which the server executes in order until one fails; returns a function that yields the answers.

        Args:
          calls: names of handlers, and their arguments. Only the last answer may be large, because it is read after all calls
            are sent.
          seconds: time limit of each transfer; None for no limit.
        """
        with self._raising_peer_lost(calls[0][0]):
            channel = self._open(seconds)
        with self._raising_peer_lost(calls[0][0], channel):
            for (method, _), size in zip(calls, channel.send(calls), strict=True):
                self.byte_counts[method] += size

        def answers() -> Iterator[Message]:
            for remaining, (method, _) in zip(range(len(calls) - 1, -1, -1), calls, strict=True):
                with self._raising_peer_lost(method, channel):
                    failure, message = channel.receive()
                    if failure:
                        raise ConnectionError(failure)
                self.byte_counts[method] += channel.received_bytes
                if not remaining:
                    self._idle.append(channel)
                yield message

        return answers

    def call(
        self, method: str, values: Mapping[str, Any], arrays: Sequence[np.ndarray] = (), seconds: float | None = None
    ) -> Message:
        """Sends a call and returns its answer.

        Raises:
          PeerLostError: the server is lost, did not answer in time, or failed.
        """
        [answer] = self.begin([(method, Message(values, arrays))], seconds)()
        return answer

    def close(self) -> None:
        """Closes the connections that no call is using."""
        while self._idle:
            self._idle.pop().socket.close()

    __del__ = close

    @contextlib.contextmanager
    def _raising_peer_lost(self, method: str, channel: _Channel | None = None) -> Iterator[None]:
        self.pending_method = method
        try:
            yield
        except (OSError, *_NOT_A_MESSAGE) as error:
            if channel:
                channel.socket.close()
            raise PeerLostError(f"{self.name} did not answer {method}: {error}.") from error
        finally:
            self.pending_method = ""

    def _open(self, seconds: float | None) -> _Channel:
        with contextlib.suppress(IndexError):
            channel = self._idle.pop()
            channel.socket.settimeout(seconds)
            return channel
        try:
            channel = _Channel(socket.create_connection(self._address, seconds), self._token, is_server=False)
        except (WrongSealError, ConnectionResetError):
            raise PermissionError("its token does not match this job's token, or it has exited") from None
        channel.socket.settimeout(seconds)
        return channel
