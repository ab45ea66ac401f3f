"""Tests of `tfdist.parameter_server.messages`."""

import json

import grpc
import ml_dtypes
import numpy as np
import psutil
import pytest

from tfdist.errors import PeerLostError
from tfdist.parameter_server.messages import Connection, Message, Service, decode, encode

ARRAYS = [np.arange(6, dtype=np.float64).reshape(2, 3), np.zeros([0, 4], np.int64), np.ones([], ml_dtypes.bfloat16)]


def test_a_message_is_what_was_encoded():
    values, arrays = decode(encode(Message({"a": [1, None, "b"]}, ARRAYS)))
    assert values == {"a": [1, None, "b"]}
    assert [(a.dtype, a.tolist()) for a in arrays] == [(a.dtype, a.tolist()) for a in ARRAYS]


def with_header(header, data=b""):
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


HOSTILE = {
    "nothing": b"",
    "no header": (2**62).to_bytes(8, "little") + b"{}",
    "no JSON": (3).to_bytes(8, "little") + b"abc",
    "a list": with_header([]),
    "too few bytes": with_header({"values": {}, "arrays": [["float32", [2]]]}, b"1234"),
    "too many bytes": with_header({"values": {}, "arrays": []}, b"1"),
    "a negative dim": with_header({"values": {}, "arrays": [["float32", [-1]]]}),
    "a huge dim": with_header({"values": {}, "arrays": [["float32", [2**62, 2**62]]]}),
    "objects": with_header({"values": {}, "arrays": [["object", [1]]]}, b"12345678"),
    "an unknown dtype": with_header({"values": {}, "arrays": [["float33", [1]]]}, b"12345678"),
}


@pytest.fixture
def service():
    def fail(message):
        raise RuntimeError("of the handler")

    served = Service({"echo": lambda message: message, "fail": fail}, "secret", "127.0.0.1", threads=2)
    yield f"127.0.0.1:{served.port}"
    served.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused_and_the_server_goes_on(service, name):
    channel = grpc.insecure_channel(service)
    with pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary("/tfdist.parameter_server/echo")(HOSTILE[name], metadata=(("tfdist-token", "secret"),))
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert Connection(service, "secret", "server 0").call("echo", {"a": 1}).values == {"a": 1}
    channel.close()


def test_only_the_given_address_is_served(service):
    port = int(service.rpartition(":")[2])
    listening = [c.laddr for c in psutil.Process().net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
    assert {address.ip.removeprefix("::ffff:") for address in listening if address.port == port} == {"127.0.0.1"}


def test_a_foreign_token_is_refused(service):
    for token in ("", "Secret", "secret "):
        with pytest.raises(PeerLostError, match="server 0 did not answer echo: UNAUTHENTICATED"):
            Connection(service, token, "server 0").call("echo", {})


def test_a_failing_handler_fails_its_call_only(service):
    connection = Connection(service, "secret", "server 0 (rank 2)")
    with pytest.raises(PeerLostError, match=r"server 0 \(rank 2\) did not answer fail: UNKNOWN, .*of the handler"):
        connection.call("fail", {})
    [array] = connection.call("echo", {}, [np.zeros([3_000_000], np.float32)]).arrays  # 12 MB, above gRPC's default
    assert array.shape == (3_000_000,)
