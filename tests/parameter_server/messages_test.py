"""Tests of `tfdist.parameter_server.messages`."""

import json
import random
import subprocess
import sys
import threading
import tracemalloc
from concurrent import futures

import grpc
import ml_dtypes
import numpy as np
import psutil
import pytest

from tfdist.errors import PeerLostError
from tfdist.parameter_server import messages
from tfdist.parameter_server.messages import Connection, Message, Service, decode, encode
from tfdist.parameter_server.variable_server import VariableServer

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
    "4 GiB that are not there": with_header({"values": {}, "arrays": [["float32", [2**30]]]}, b"1234"),
    "no elements of a huge dim": with_header({"values": {}, "arrays": [["float32", [0, 2**70]]]}),
    "nested lists": (200_000).to_bytes(8, "little") + b"[" * 200_000,
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
def test_hostile_bytes_of_a_member_are_refused_without_memory_and_the_server_goes_on(service, name, monkeypatch):
    tracemalloc.start()
    with pytest.raises((ValueError, KeyError, TypeError, OverflowError, RecursionError)):
        decode(HOSTILE[name])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    connection = Connection(service, "secret", "server 0")
    with monkeypatch.context() as patch:
        patch.setattr(messages, "encode", lambda _: HOSTILE[name])
        with pytest.raises(PeerLostError, match="INVALID_ARGUMENT, not a message"):
            connection.call("echo", {})
    assert connection.call("echo", {"a": 1}).values == {"a": 1}


class Between(grpc.GenericRpcHandler):
    """A reader and writer on the path from a client to a server.

    Attributes:
      calls: method, message and seal of each call.
      answers: answers and their seals.
      alter_call: function of a call that returns the one that is sent.
      alter_answer: function of an answer that returns the one that is sent.
    """

    def __init__(self, address):
        self.channel = grpc.insecure_channel(address)
        self.calls, self.answers, self.alter_call, self.alter_answer = (
            [],
            [],
            lambda *call: call,
            lambda *answer: answer,
        )
        self.server = grpc.server(futures.ThreadPoolExecutor(2))
        self.server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def send(self, method, data, seal):
        answer, call = self.channel.unary_unary(method).with_call(data, metadata=(("tfdist-seal-bin", seal),))
        return answer, dict(call.trailing_metadata())["tfdist-seal-bin"]

    def service(self, details):
        def forward(data, context):
            self.calls.append((details.method, data, dict(details.invocation_metadata)["tfdist-seal-bin"]))
            try:
                self.answers.append(self.send(*self.alter_call(*self.calls[-1])))
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
            answer, seal = self.alter_answer(*self.answers[-1])
            context.set_trailing_metadata((("tfdist-seal-bin", seal),))
            return answer

        return grpc.unary_unary_rpc_method_handler(forward)

    def close(self):
        self.server.stop(None)
        self.channel.close()


@pytest.fixture
def pushed():
    """Yields a server's gradients, someone between it and a client, and a function that pushes a gradient."""
    server = VariableServer(lambda version, seconds: [], lambda key, number: 0.0)
    service = Service(server.handlers, "secret", "127.0.0.1", threads=2)
    between = Between(f"127.0.0.1:{service.port}")
    connection = Connection(between.address, "secret", "server 0")

    def push(ticket):
        connection.call("push", {"worker": 0, "ticket": ticket}, [np.full([20_000], ticket, np.float32)])

    yield server._gradient_messages, between, push
    connection.close()
    between.close()
    service.close()


def flipped(data, position):
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


ALTERED_CALLS = {
    "nothing": (lambda method, data, seal: (method, data, seal), None),
    "a byte of the header": (lambda method, data, seal: (method, flipped(data, 12), seal), "not the message"),
    "a byte of a gradient": (lambda method, data, seal: (method, flipped(data, 9_000), seal), "not the message"),
    "a byte more": (lambda method, data, seal: (method, data + b"1", seal), "not the message"),
    "the length of the header": (
        lambda method, data, seal: (method, (2**63).to_bytes(8, "little") + data[8:], seal),
        "not the message",
    ),
    "the method": (lambda method, data, seal: (method.replace("push", "write"), data, seal), "not authenticated"),
    "the client": (lambda method, data, seal: (method, data, flipped(seal, 0)), "not authenticated"),
    "the number": (lambda method, data, seal: (method, data, flipped(seal, 16)), "not authenticated"),
    "a short seal": (lambda method, data, seal: (method, data, seal[:-1]), "not authenticated"),
    "no seal": (lambda method, data, seal: (method, data, b""), "not authenticated"),
}


@pytest.mark.parametrize("name", ALTERED_CALLS)
def test_an_altered_call_is_refused_and_changes_nothing(name, pushed):
    gradients, between, push = pushed
    between.alter_call, refusal = ALTERED_CALLS[name]
    if refusal:
        with pytest.raises(PeerLostError, match=f"UNAUTHENTICATED, {refusal}"):
            push(1)
    else:
        push(1)
    assert len(gradients) == (not refusal)
    between.alter_call = ALTERED_CALLS["nothing"][0]
    push(2)
    assert (2, 0) in gradients


def test_a_recorded_push_is_refused_by_the_same_server_and_by_others(pushed):
    gradients, between, push = pushed
    push(1), push(2)
    gradients.clear()  # as they are applied
    other_server = Service({"push": lambda message: message}, "secret of server 1", "127.0.0.1", threads=2)
    elsewhere = Between(f"127.0.0.1:{other_server.port}")
    for sender, reason in ((between, "a repeated call"), (elsewhere, "not authenticated")):
        for call in between.calls:
            with pytest.raises(grpc.RpcError) as refused:
                sender.send(*call)
            assert (refused.value.code(), reason) == (
                grpc.StatusCode.UNAUTHENTICATED,
                refused.value.details()[: len(reason)],
            )
    elsewhere.close(), other_server.close()
    assert not gradients
    push(3)
    assert [*gradients] == [(3, 0)]


ALTERED_ANSWERS = {
    "a byte": (lambda answer, seal: (flipped(answer, 10), seal), "not the message"),
    "no seal": (lambda answer, seal: (answer, b""), "not authenticated"),
    "the seal of the call": (lambda answer, seal: (answer, b"call"), "not authenticated"),
    "that of another call": (lambda answer, seal: (answer, b"other"), "an answer to another call"),
}


@pytest.mark.parametrize("name", ALTERED_ANSWERS)
def test_an_answer_of_anyone_else_is_refused(name, pushed):
    _, between, push = pushed
    push(1)
    alter, reason = ALTERED_ANSWERS[name]

    def alter_answer(answer, seal):
        answer, seal = alter(answer, seal)
        return answer, {b"call": between.calls[-1][2], b"other": between.answers[0][1]}.get(seal, seal)

    between.alter_answer = alter_answer
    with pytest.raises(PeerLostError, match=f"server 0 did not answer push: the answer is {reason}"):
        push(2)
    between.alter_answer = lambda *answer: answer
    push(3)


def test_calls_arrive_in_any_order_within_the_window_and_once():
    calls, numbers = messages._AdmittedCalls(), [*range(5000)]
    for start in range(0, 5000, 500):
        numbers[start : start + 500] = random.Random(start).sample(numbers[start : start + 500], 500)
    assert all([calls.admit(number) for number in numbers])
    assert not any([calls.admit(number) for number in numbers])
    assert calls.admit(10_000) and calls.admit(9_000) and not calls.admit(9_000) and not calls.admit(10_000 - 1024)


SEND_100_MB = """
import sys, grpc
channel = grpc.insecure_channel(sys.argv[1], options=[("grpc.max_send_message_length", -1)])
try:
    channel.unary_unary("/tfdist.parameter_server/echo")(bytes(100 << 20), metadata=(("tfdist-seal-bin", bytes(96)),))
except grpc.RpcError as error:
    print(error.code().name)
"""


def test_a_message_without_the_token_takes_no_memory(service):
    process, sizes, is_over = psutil.Process(), [], threading.Event()

    def sample():
        while not is_over.wait(0.002):
            sizes.append(process.memory_info().rss)

    sampler = threading.Thread(target=sample)
    sampler.start()
    command = [sys.executable, "-c", SEND_100_MB, service]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    is_over.set(), sampler.join()
    assert done.stdout == "UNAUTHENTICATED\n", done.stderr
    assert max(sizes) - sizes[0] < 30 << 20


def test_only_the_given_address_is_served(service):
    port = int(service.rpartition(":")[2])
    listening = [c.laddr for c in psutil.Process().net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
    assert {address.ip.removeprefix("::ffff:") for address in listening if address.port == port} == {"127.0.0.1"}


def test_a_foreign_token_is_refused(service):
    for token in ("", "Secret", "secret "):
        with pytest.raises(PeerLostError, match="server 0 did not answer echo: UNAUTHENTICATED, not authenticated"):
            Connection(service, token, "server 0").call("echo", {})


def test_a_failing_handler_fails_its_call_only(service):
    connection = Connection(service, "secret", "server 0 (rank 2)")
    with pytest.raises(PeerLostError, match=r"server 0 \(rank 2\) did not answer fail: UNKNOWN, .*of the handler"):
        connection.call("fail", {})
    [array] = connection.call("echo", {}, [np.zeros([3_000_000], np.float32)]).arrays  # 12 MB, above gRPC's default
    assert array.shape == (3_000_000,)
