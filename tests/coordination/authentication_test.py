"""Seals of messages, and a man in the middle of a real connection, who can cut it and nothing more."""

import json
import re

import pytest

from tests.waiting import DEADLINE, wait_for
from tfdist.coordination import RemoteGroup
from tfdist.coordination.messages import Session, WrongSealError, encode
from tfdist.errors import PeerLostError

pytestmark = [pytest.mark.processes, pytest.mark.waits]


def ends(
    token: str = "token", other: str = "token", hello: bytes = b"a", challenge: bytes = b"b"
) -> tuple[Session, Session]:
    return Session(token, b"a", b"b", is_server=False), Session(other, hello, challenge, is_server=True)


@pytest.mark.parametrize(
    "change",
    [{"other": "another"}, {"hello": b"a'"}, {"challenge": b"b'"}, {"other": ""}, {"other": "\ud800"}],
    ids=str,
)
def test_another_token_or_another_beginning_opens_nothing(change):
    client, server = ends(**change)
    with pytest.raises(WrongSealError):
        server.unseal(client.seal(b"{}\n")[:-1])
    with pytest.raises(WrongSealError):
        client.unseal(server.seal(b"{}\n")[:-1])


def test_no_message_is_altered_repeated_left_out_or_sent_back():
    client, server = ends()
    first, second = client.seal(b"first\n")[:-1], client.seal(b"second\n")[:-1]
    for place in range(len(first)):
        for forged in (first[:place] + bytes([first[place] ^ 1]) + first[place + 1 :], first[:place]):
            with pytest.raises(WrongSealError):
                server.unseal(forged)
    with pytest.raises(WrongSealError):  # the first is left out
        server.unseal(second)
    with pytest.raises(WrongSealError):  # sent back
        client.unseal(first)
    assert server.unseal(first) == b"first"
    with pytest.raises(WrongSealError):  # repeated
        server.unseal(first)
    assert server.unseal(second) == b"second"


def joined(job, address: str, rank: int = 1) -> RemoteGroup:
    job.members[rank] = RemoteGroup(address, rank=rank, size=job.size, token="the job's token", timeout=DEADLINE)
    return job.members[rank]


def test_the_token_is_not_sent(job, middle):
    two = job(2, members=False)
    two.join(0)
    between = middle(two.server.address)
    joined(two, between.address)
    assert two.all(lambda m: m.gather("x", m.rank)) == [[0, 1]] * 2
    [(asked, answered)] = between.seen
    for line in asked + answered:
        assert b"the job's token" not in line
    assert json.loads(asked[0])["type"] == "hello" and json.loads(answered[0])["type"] == "challenge"
    assert all(re.match(rb"[0-9a-f]{64} \{", line) for line in asked[1:] + answered[1:])


GOODBYE, CLOSED = encode({"type": "goodbye", "code": 0, "reason": ""}), encode({"type": "closed", "reason": "no"})


@pytest.mark.parametrize(
    "way, change",
    [
        ("to_server", lambda number, line: line.replace(b'"value":1', b'"value":7')),
        ("to_server", lambda number, line: line + line if b'"gather"' in line else line),
        ("to_server", lambda number, line: line + (GOODBYE if number == 1 else b"")),
        ("to_client", lambda number, line: line.replace(b'"values":[0', b'"values":[9')),
        ("to_client", lambda number, line: b"" if number == 2 else line),
        ("to_client", lambda number, line: line + (CLOSED if number == 2 else b"")),
    ],
    ids=["altered", "repeated", "injected", "altered answer", "left out", "injected answer"],
)
def test_whoever_changes_a_message_cuts_the_connection(job, middle, way, change):
    two = job(2, members=False, heartbeat=0.1)
    two.join(0)
    between = middle(two.server.address, **{way: change})
    member = joined(two, between.address)
    pending = two.start(two.members[0].gather, "x", 0, 10.0)
    try:
        found = member.gather("x", 1, 5.0)
    except PeerLostError:
        found = [0, 1]  # or nothing arrived
    assert found == [0, 1]
    loss = wait_for(two.members[0].first_loss)
    assert loss and loss.rank == 1
    try:
        assert pending.result(DEADLINE) == [0, 1]
    except PeerLostError:
        pass
