"""Messages of JSON values and arrays between workers and servers, and gRPC calls that send them.

A message consists of the length of the header (8 bytes, little-endian), the header as JSON, and the bytes of the arrays.
`grpcio` is already a dependency of TensorFlow. A server listens only on the given address, and checks the job's token before it
parses a message.
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

_LENGTH_BYTES = 8
_SERVICE = "tfdist.parameter_server"
_TOKEN = "tfdist-token"  # key in the metadata of a call
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.so_reuseport", 0)]
_DTYPES = {np.dtype(getattr(ml_dtypes, name)).name: np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16",)}


class Message(NamedTuple):
    """The contents of a call or of its answer.

    Attributes:
      values: JSON values, by name.
      arrays: arrays of any shape; in a received message, read-only views of its bytes.
    """

    values: Mapping[str, Any]
    arrays: Sequence[np.ndarray] = ()


def encode(message: Message) -> bytes:
    """Serializes a message; copies the arrays once."""
    arrays = [np.asarray(array, order="C") for array in message.arrays]
    array_specs = [(array.dtype.name, array.shape) for array in arrays]
    header = json.dumps({"values": message.values, "arrays": array_specs}).encode()
    data = [array.reshape(-1).view(np.uint8).data for array in arrays]
    return b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *data])


def decode(data: bytes) -> Message:
    """Parses a message; its arrays share the memory of `data`.

    Raises:
      ValueError: `data` is not a message.
    """
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    header = json.loads(data[_LENGTH_BYTES:end])
    arrays, position = [], end
    for name, shape in header["arrays"]:
        dtype = _DTYPES.get(name) or np.dtype(name)
        if dtype.hasobject or any(not isinstance(dim, int) or dim < 0 for dim in shape):
            raise ValueError(f"an array of {name} {shape}")
        count = math.prod(shape)
        if position + count * dtype.itemsize > len(data):
            raise ValueError(f"{len(data)} bytes for an array of {name} {shape} at byte {position}")
        arrays.append(np.frombuffer(data, dtype, count, position).reshape(shape))
        position += count * dtype.itemsize
    if position != len(data):
        raise ValueError(f"{len(data)} bytes for arrays that end at byte {position}")
    return Message(header["values"], arrays)


Handler = Callable[[Message], Message]


class Service:
    """A gRPC server for calls by name. Each call runs in its own thread, and may block.

    Attributes:
      port: the port on which it listens.
    """

    def __init__(self, handlers: Mapping[str, Handler], token: str, host: str, *, threads: int, port: int = 0):
        """Starts the server.

        Args:
          handlers: functions by name. An exception fails the call, but not the server.
          token: token of the job; calls without it fail.
          host: name or address of this host, on which the server listens.
          threads: maximum number of concurrent calls, including blocked ones.
          port: port to listen on; 0 for any.
        """
        self._server = grpc.server(
            futures.ThreadPoolExecutor(threads), interceptors=[_TokenInterceptor(token)], options=_UNLIMITED
        )
        methods = {name: grpc.unary_unary_rpc_method_handler(_method(handler)) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
        self.port = self._server.add_insecure_port(f"{host}:{port}")
        self._server.start()

    def close(self) -> None:
        """Stops the server; blocked calls fail."""
        self._server.stop(grace=None)


class _TokenInterceptor(grpc.ServerInterceptor):
    def __init__(self, token: str):
        self._token = token.encode()

        def refuse(_: bytes, context: Any) -> None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "the token is not that of this job")

        self._refusal = grpc.unary_unary_rpc_method_handler(refuse)

    def intercept_service(self, continuation: Any, details: Any) -> Any:
        """See base class."""
        token = dict(details.invocation_metadata).get(_TOKEN, "")
        return continuation(details) if hmac.compare_digest(token.encode(), self._token) else self._refusal


def _method(handler: Handler) -> Callable[[bytes, Any], bytes]:
    def answer(data: bytes, context: Any) -> bytes:
        try:
            message = decode(data)
        except (ValueError, KeyError, TypeError) as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a message: {error}")
        return encode(handler(message))

    return answer


class Connection:
    """A connection to one server."""

    def __init__(self, address: str, token: str, name: str):
        """Initializes the connection; the first call connects.

        Args:
          address: `host:port` of the server.
          token: token of the job.
          name: display name of the server in error messages, such as "server 0 (rank 2)".
        """
        self._channel = grpc.insecure_channel(address, options=_UNLIMITED)
        self._metadata = ((_TOKEN, token),)
        self._name = name

    def begin(self, method: str, message: Message, seconds: float | None) -> Callable[[], Message]:
        """Starts a call; returns a function that waits for the answer.

        Args:
          method: name of the handler.
          message: argument of the handler.
          seconds: time limit of the call; None for no limit.
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
        """Closes the connection."""
        self._channel.close()
