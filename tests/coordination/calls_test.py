"""Calls between two processes: what they carry, and what others on the way, or without the token, cannot do."""

import contextlib
import json
import socket
import tracemalloc

import ml_dtypes
import numpy as np
import psutil
import pytest

from tests.coordination.wire import Between, as_it_is
from tfdist.coordination import calls
from tfdist.coordination.calls import Connection, Message, Service, decode, encode
from tfdist.coordination.job_token import listen, split_address
from tfdist.errors import PeerLostError

ARRAYS = [np.arange(6, dtype=np.float64).reshape(2, 3), np.zeros([0, 4], np.int64), np.ones([], ml_dtypes.bfloat16)]


@pytest.fixture
def service():
    def fail(message):
        raise RuntimeError("of the handler")

    served = Service({"echo": lambda message: message, "fail": fail}, "secret", listen("127.0.0.1:0", ""))
    yield f"127.0.0.1:{served.port}"
    served.close()


def test_a_message_is_what_was_sent(service):
    values, arrays = Connection(service, "secret", "server 0").call("echo", {"a": [1, None, "b"]}, ARRAYS * 400)
    assert values == {"a": [1, None, "b"]} and len(arrays) == 1200
    for received, sent in zip(arrays, ARRAYS * 400, strict=True):
        assert (received.dtype, received.tolist()) == (sent.dtype, sent.tolist())


DIGEST = calls._digest([])
HOSTILE = {
    "no JSON": b"abc",
    "a list": b"[]",
    "nested lists": b"[" * 200_000,
    "no digest": json.dumps({"title": "echo", "values": {}, "arrays": []}).encode(),
    **{
        name: json.dumps({"title": "echo", "values": {}, "arrays": arrays, "digest": DIGEST}).encode()
        for name, arrays in {
            "a negative dim": [["float32", [-1]]],
            "a huge dim": [["float32", [2**62, 2**62]]],
            "4 EiB that are not there": [["float32", [2**60]]],
            "no elements of a huge dim": [["float32", [0, 2**70]]],
            "objects": [["object", [1]]],
            "an unknown dtype": [["float33", [1]]],
        }.items()
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_of_a_member_are_refused_without_memory_and_the_server_goes_on(service, name, monkeypatch):
    tracemalloc.start()
    with pytest.raises(calls._NOT_A_MESSAGE):
        decode(HOSTILE[name], lambda count: np.zeros([min(count, 1000)], np.uint8))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    connection = Connection(service, "secret", "server 0")
    with monkeypatch.context() as patch:
        patch.setattr(calls, "encode", lambda m, t: [HOSTILE[name] + b"\n"] if t == "echo" else encode(m, t))
        channel = connection._open(None)
        channel.send([("echo", Message({}))])
    with contextlib.closing(channel.socket):
        assert channel.receive()[0].startswith("not a call: ")
        with pytest.raises(ConnectionResetError):
            channel.receive()
    assert connection.call("echo", {"a": 1}).values == {"a": 1}


@pytest.fixture
def pushed():
    """Yields what a server has got, by ticket, someone between it and a client, and a function that pushes an array."""
    gradients = {}

    def keep(message):
        gradients[message.values["ticket"]] = message
        return Message({})

    service = Service({"push": keep}, "secret", listen("127.0.0.1:0", ""))
    between = Between(f"127.0.0.1:{service.port}", by_line=False)
    connections = [Connection(between.address, "secret", "server 0") for _ in range(2)]

    def push(ticket, connection=0):
        array = np.full([2_000], ticket, np.float32)
        connections[connection].call("push", {"ticket": ticket}, [array], seconds=5)

    yield gradients, between, push
    for connection in connections:
        connection.close()
    between.close()
    service.close()


def flipped(data, position):
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


ALTERED = {
    "the MAC": lambda data: flipped(data, 8),
    "the header": lambda data: flipped(data, 90),
    "the length of the header": lambda data: (2**62).to_bytes(8, "little") + data[8:],
    "a byte of a gradient": lambda data: flipped(data, len(data) - 100),
}


@pytest.mark.parametrize("name", ALTERED)
def test_an_altered_call_is_refused_and_changes_nothing(name, pushed):
    gradients, between, push = pushed
    push(1)
    between.to_server = lambda number, data: ALTERED[name](data)
    with pytest.raises(PeerLostError, match="server 0 did not answer push"):
        push(2)
    assert [*gradients] == [1]
    between.to_server = as_it_is
    push(3, connection=1)
    assert [*gradients] == [1, 3]


def test_a_repeated_push_is_refused_in_its_connection_and_in_others(pushed):
    gradients, between, push = pushed
    push(1), push(2)
    gradients.clear()  # as they are applied
    sent = between.seen[0][0].copy()
    between.to_server = lambda number, data: sent[-1]
    with pytest.raises(PeerLostError):
        push(3)
    between.to_server = as_it_is
    with socket.create_connection(split_address(between.address)) as client:  # the whole connection
        client.sendall(b"".join(sent))
        client.settimeout(5)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while data := client.recv(1 << 16):
                received += data
    assert len(received) == 32 and not gradients  # a new random number, and the end
    push(4, connection=1)
    assert [*gradients] == [4]


@pytest.mark.parametrize("position", [8, 90])
def test_an_altered_answer_is_refused(position, pushed):
    _, between, push = pushed
    push(1)
    between.to_client = lambda number, data: flipped(data, position)
    with pytest.raises(PeerLostError, match="server 0 did not answer push: a message that is not authenticated"):
        push(2)


def test_a_server_without_the_token_is_refused():
    other = Service({"echo": lambda message: message}, "secret of server 1", listen("127.0.0.1:0", ""))
    with pytest.raises(PeerLostError, match="server 0 did not answer echo: its token does not match this job's token"):
        Connection(f"127.0.0.1:{other.port}", "secret of server 0", "server 0").call("echo", {})
    other.close()


def test_a_client_without_the_token_has_no_memory_or_time_of_others(service, monkeypatch):
    monkeypatch.setattr(calls, "MAX_UNAUTHENTICATED", 3)
    clients = []
    for _ in range(5):
        clients.append(socket.create_connection(split_address(service)))
        assert len(clients[-1].recv(32, socket.MSG_WAITALL)) == 32  # a random number
    assert Connection(service, "secret", "server 0").call("echo", {"a": 1}).values == {"a": 1}
    assert [client.recv(1) for client in clients[:3]] == [b""] * 3  # the oldest are closed
    process, size = psutil.Process(), psutil.Process().memory_info().rss
    with contextlib.suppress(OSError):
        clients[4].sendall(bytes(64 << 20))
    assert process.memory_info().rss - size < 30 << 20
    for client in clients:
        client.close()


def test_only_the_given_address_is_served(service):
    port = int(service.rpartition(":")[2])
    listening = [c.laddr for c in psutil.Process().net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
    assert {address.ip.removeprefix("::ffff:") for address in listening if address.port == port} == {"127.0.0.1"}


def test_a_failing_handler_fails_its_calls_only(service):
    connection = Connection(service, "secret", "server 0 (rank 2)")
    with pytest.raises(PeerLostError, match=r"server 0 \(rank 2\) did not answer fail: RuntimeError: of the handler"):
        connection.call("fail", {})
    sizes = [0, 1, 3_000_000]
    answers = connection.begin([("echo", Message({"size": n}, [np.zeros([n])])) for n in sizes])()
    assert [(values["size"], array.size) for values, [array] in answers] == [(n, n) for n in sizes]
    handled = []
    handlers = {"fail": lambda _: 1 / 0, "log": lambda message: handled.append(message) or message}
    other = Service(handlers, "secret", listen("127.0.0.1:0", ""))
    with pytest.raises(PeerLostError, match="did not answer fail"):
        calls = [("fail", Message({})), ("log", Message({}))]
        list(Connection(f"127.0.0.1:{other.port}", "secret", "server").begin(calls)())
    other.close()
    assert not handled


def test_the_header_has_the_digest_of_the_first_arrays():
    header, *_ = encode(Message({}, [np.zeros([10])]))
    with pytest.raises(ValueError, match="data that does not match the digest"):
        decode(header, lambda count: np.ones([count], np.uint8))
