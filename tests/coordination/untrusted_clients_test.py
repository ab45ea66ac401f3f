"""What untrusted clients, and members whose messages make no sense, cannot do to a group's server; see fuzz_test.py, too."""

import contextlib
import json
import socket
import time

import pytest

from tests.coordination.members import outcome
from tests.coordination.wire import GATHER, HELLO, Wire, drip
from tests.waiting import DEADLINE, wait_for
from tfdist.coordination.job_token import split_address
from tfdist.coordination.messages import encode
from tfdist.coordination.server import PendingOperations

pytestmark = [pytest.mark.processes, pytest.mark.waits]


def test_an_untrusted_client_learns_nothing_without_the_token(job):
    two = job(2)
    for sealed in ({"type": "join"}, GATHER):
        with Wire(two.server.address) as wire:
            wire.sock.sendall(encode(HELLO) + encode(sealed))
            challenge, refused = map(json.loads, wire.rest())
        assert sorted(challenge) == ["nonce", "type"]
        assert refused["type"] == "refused" and "token" in refused["reason"]
    assert two.all(lambda m: m.gather("x", m.rank)) == [[0, 1]] * 2


def test_an_error_while_one_member_is_served_costs_that_member_alone(job, monkeypatch, caplog):
    three = job(3)
    add = PendingOperations.add

    def broken(self, rank, *arguments):
        if rank == 2:
            raise RuntimeError("a mistake of the server")
        return add(self, rank, *arguments)

    monkeypatch.setattr(PendingOperations, "add", broken)
    assert "rank 2 is lost: it could not be served" in outcome(three.members[2].gather, "x", 2)
    loss = wait_for(three.members[0].first_loss)
    assert loss and loss.rank == 2 and "a mistake of the server" in loss.reason
    assert [record.levelname for record in caplog.records].count("ERROR") == 1
    pair = three.start(three.members[0].subgroup([0, 1]).gather, "x", 0)
    assert three.members[1].subgroup([0, 1]).gather("x", 1) == [0, 1] == pair.result(DEADLINE)


def is_closed(sock):
    sock.settimeout(DEADLINE)
    return sock.recv(1) == b""


def test_whoever_drips_is_closed_at_a_fixed_time(job, monkeypatch):
    monkeypatch.setattr("tfdist.coordination.messages.HELLO_SECONDS", 1.0)
    two = job(2, heartbeat=0.1)
    began = time.monotonic()
    with socket.create_connection(split_address(two.server.address)) as sock:
        drip(sock)
    assert 1.0 <= time.monotonic() - began < DEADLINE / 2
    assert two.all(lambda m: m.gather("x", m.rank)) == [[0, 1]] * 2


def test_untrusted_clients_are_limited_in_number_and_a_member_still_joins(job, monkeypatch):
    monkeypatch.setattr("tfdist.coordination.messages.MAX_UNAUTHENTICATED", 8)
    two = job(2, members=False)
    with contextlib.ExitStack() as stack:
        address = split_address(two.server.address)
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(40)]
        assert all(is_closed(sock) for sock in clients[:32])
        two.join(0)
        two.join(1)
        assert two.all(lambda m: m.gather("x", m.rank)) == [[0, 1]] * 2


def test_a_server_that_closes_does_not_wait_for_untrusted_clients(job, monkeypatch):
    monkeypatch.setattr("tfdist.coordination.server.CLOSE_SECONDS", DEADLINE)
    two = job(2)
    with Wire(two.server.address) as silent, Wire(two.server.address) as greeted:
        greeted.sock.sendall(encode(HELLO))
        assert json.loads(next(greeted.lines))["type"] == "challenge"
        for member in two.members.values():
            member.leave()
        began = time.monotonic()
        two.server.close()
        assert time.monotonic() - began < DEADLINE / 2
        assert silent.rest() == greeted.rest() == []
