"""Messages between workers and servers: values that JSON can express, and arrays, as bytes; and the calls that carry them.

A message is the length of a header (8 bytes, little-endian), the header as JSON, and the bytes of the arrays, end to end. gRPC
carries it: `grpcio` is a dependency of TensorFlow, its calls have deadlines, and a server serves the address that it is given
alone. Every call carries the token of the job, which is compared before anything of the message is read.
"""

import hmac
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import grpc
import ml_dtypes
import numpy as np

from tfdist.errors import PeerLostError

_LENGTH = 8  # bytes
_SERVICE = "tfdist.parameter_server"
_TOKEN = "tfdist-token"  # key in the metadata of a call
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)]
_DTYPES = {np.dtype(getattr(ml_dtypes, name)).name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16",)}


class Message(NamedTuple):
    """What a call or its answer contains.

    Attributes:
      values: by name; anything that JSON can express.
      arrays: of any shape; of a received message, read-only views of its bytes.
    """

    values: Mapping[str, Any]
    arrays: Sequence[np.ndarray] = ()


def encode(message: Message) -> bytes:
    """Returns a message as bytes; the arrays are copied once."""
    arrays = [np.asarray(array, order="C") for array in message.arrays]
    forms = [(array.dtype.name, array.shape) for array in arrays]
    header = json.dumps({"values": message.values, "arrays": forms}).encode()
    data = [array.reshape(-1).view(np.uint8).data for array in arrays]
    return b"".join([len(header).to_bytes(_LENGTH, "little"), header, *data])


def decode(data: bytes) -> Message:
    """Returns the message in these bytes; its arrays share their memory.

    Raises:
      ValueError: the bytes are no message.
    """
    end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    header = json.loads(data[_LENGTH:end])
    arrays, at = [], end
    for name, shape in header["arrays"]:
        dtype = _DTYPES.get(name) or np.dtype(name)
        if dtype.hasobject or any(not isinstance(dim, int) or dim < 0 for dim in shape):
            raise ValueError(f"an array of {name} {shape}")
        count = math.prod(shape)
        if at + count * dtype.itemsize > len(data):
            raise ValueError(f"{len(data)} bytes for an array of {name} {shape} at byte {at}")
        arrays.append(np.frombuffer(data, dtype, count, at).reshape(shape))
        at += count * dtype.itemsize
    if at != len(data):
        raise ValueError(f"{len(data)} bytes for arrays that end at byte {at}")
    return Message(header["values"], arrays)


Handler = Callable[[Message], Message]


class Service:
    """Serves calls by name; each runs in a thread of its own, and may wait.

    Attributes:
      port: the port that is served.
    """

    def __init__(self, handlers: Mapping[str, Handler], token: str, host: str, *, threads: int, port: int = 0):
        """Starts to serve.

        Args:
          handlers: functions by name. An exception of theirs fails the call, and nothing else.
          token: the job's; calls without it are refused.
          host: name or address of this host, which alone is served.
          threads: number of calls that may wait or run at a time.
          port: port to serve; 0 for any.
        """
        self._server = grpc.server(
            futures.ThreadPoolExecutor(threads), interceptors=[_OnlyWithToken(token)], options=_UNLIMITED
        )
        methods = {name: grpc.unary_unary_rpc_method_handler(_answering(handler)) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
        self.port = self._server.add_insecure_port(f"{host}:{port}")
        self._server.start()

    def close(self) -> None:
        """Stops serving; calls that wait fail."""
        self._server.stop(grace=None)


class _OnlyWithToken(grpc.ServerInterceptor):
    def __init__(self, token: str):
        self._token = token.encode()

        def refuse(_: bytes, context: Any) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not that of this job")

        self._refusal = grpc.unary_unary_rpc_method_handler(refuse)

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        """See base class."""
        token = dict(details.invocation_metadata).get(_TOKEN, "")
        return continuation(details) if hmac.compare_digest(token.encode(), self._token) else self._refusal


def _answering(handler: Handler) -> Callable[[bytes, Any], bytes]:
    def answer(data: bytes, context: Any) -> bytes:
        try:
            message = decode(data)
        except (ValueError, KeyError, TypeError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a message: {error}")
        return encode(handler(message))

    return answer


class Connection:
    """Calls to one server."""

    def __init__(self, address: str, token: str, name: str):
        """Initializes the connection, which is made by the first call.

        Args:
          address: `host:port` of the server.
          token: the job's.
          name: what the server is called in messages, such as "server 0 (rank 2)".
        """
        self._channel = grpc.insecure_channel(address, options=_UNLIMITED)
        self._metadata = ((_TOKEN, token),)
        self._name = name

    def begin(self, method: str, message: Message, seconds: float | None) -> Callable[[], Message]:
        """Begins a call; returns what waits for its answer.

        Args:
          method: name of the handler.
          message: what it is given.
          seconds: how long the server may take; None for no limit.
        """
        call = self._channel.unary_unary(f"/{_SERVICE}/{method}")
        future = call.future(encode(message), timeout=seconds, metadata=self._metadata)

        def answer() -> Message:
            try:
                return decode(future.result())
            except grpc.RpcError as error:
                raise PeerLostError(
                    f"{self._name} did not answer {method}: {error.code().name}, {error.details()}."
                ) from error

        return answer

    def call(
        self, method: str, values: Mapping[str, Any], arrays: Sequence[np.ndarray] = (), seconds: float | None = None
    ) -> Message:
        """Makes a call and returns its answer.

        Raises:
          PeerLostError: the server is lost, did not answer in time, or failed.
        """
        return self.begin(method, Message(values, arrays), seconds)()

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()
