import contextlib
import json
import re
import socket
import threading
import time

import pytest

from tests.coordination.suspension import Suspension
from tests.coordination.wire import drip
from tests.waiting import DEADLINE, wait_for
from tfdist.coordination import LostMember, RemoteGroup, Server
from tfdist.coordination.group import LAUNCHER, NO_GOODBYE
from tfdist.coordination.job_token import LOOPBACK, listen
from tfdist.coordination.messages import Session, encode
from tfdist.errors import InputError, PeerLostError
from tfdist.launcher.placement import free_ports

pytestmark = [pytest.mark.processes, pytest.mark.waits]

WELCOME = {"type": "welcome", "nonce": "n", "heartbeat": 0.05, "lost_after": DEADLINE}


class Scripted:
    """A server for one connection that sends the given messages, sealed, or other bytes instead, and nothing else."""

    def __init__(self, *messages, raw=b"", drips=False):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.messages, self.raw, self.drips = messages, raw, drips
        self.heard = []
        self.connection = None
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self):
        with contextlib.suppress(OSError):  # the member may have given up before this thread runs
            self.accept()

    def accept(self):
        self.connection, _ = self.listener.accept()
        with self.connection.makefile("rb") as lines:
            hello = next(lines)[:-1]
            self.heard.append(json.loads(hello))
            self.connection.sendall(self.raw)
            if self.drips:
                drip(self.connection)
            if not self.messages:
                return
            challenge = encode({"type": "challenge", "nonce": "1"})
            session = Session("t", hello, challenge[:-1], is_server=True)
            self.connection.sendall(challenge)
            assert json.loads(session.unseal(next(lines)[:-1])) == {"type": "join"}
            self.connection.sendall(b"".join(session.seal(encode(message)) for message in self.messages))
            for line in lines:
                self.heard.append(json.loads(session.unseal(line[:-1])))
            self.connection.shutdown(socket.SHUT_WR)  # as a server does after a goodbye

    def close(self):
        if self.connection:
            self.connection.close()
        self.listener.close()
        self.thread.join(DEADLINE)


@pytest.fixture
def scripted():
    servers = []

    def create(*messages, **arguments):
        servers.append(Scripted(*messages, **arguments))
        return servers[-1]

    yield create
    for server in servers:
        server.close()


def member(address, timeout=DEADLINE, **options):
    return RemoteGroup(address, rank=1, size=2, token="t", timeout=timeout, **options)


def test_a_server_that_is_not_there_is_named():
    address = f"{LOOPBACK}:{free_ports(1, LOOPBACK)[0]}"
    with pytest.raises(PeerLostError) as raised:
        member(address, timeout=0.3)
    assert str(raised.value) == f"rank 0 did not answer at {address} within 0.3 s (Connection refused)."
    with pytest.raises(PeerLostError, match="^the launcher did not answer"):
        member(address, timeout=0.1, server_rank=LAUNCHER)
    with pytest.raises(PeerLostError, match="^node 0 did not answer"):
        member(address, timeout=0.1, noun="node")


@pytest.mark.parametrize("drips", [False, True])
def test_a_server_that_does_not_speak_or_drips_is_given_up_at_the_timeout(scripted, drips):
    server = scripted(drips=drips)
    began = time.monotonic()
    with pytest.raises(PeerLostError, match=r"within 0.5 s \(timed out\)"):
        member(server.address, timeout=0.5)
    assert time.monotonic() - began < DEADLINE / 2


def test_the_text_of_a_refusal_is_shown_short_and_without_control_characters(scripted):
    server = scripted(raw=encode({"type": "refused", "reason": "a\x1b[2J\n\u202e" + "x" * 5000}))
    with pytest.raises(InputError) as raised:
        member(server.address)
    text = str(raised.value)
    assert text.startswith(r"a\x1b[2J\n\u202exxx") and len(text) == 1000 and text.isprintable()


def test_a_server_that_comes_later_is_found():
    address, found = f"{LOOPBACK}:{free_ports(1, LOOPBACK)[0]}", []
    joining = threading.Thread(target=lambda: found.append(member(address)))
    joining.start()
    time.sleep(0.25)
    server = Server(listen(address, ""), size=2, token="t")
    joining.join(DEADLINE)
    found[0].leave()
    server.close()


def test_another_program_at_the_address_is_bad_input(scripted):
    server = scripted(raw=b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with pytest.raises(InputError, match="A group of tfdist must answer at .* Another program listens there"):
        member(server.address)


NONSENSE = "it sent a message that cannot be handled"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"type": "values"}, f"{NONSENSE} (KeyError: 'ticket')"),
        ({"type": "values", "ticket": []}, f"{NONSENSE} (TypeError: unhashable type: 'list')"),
        ({"type": "closed"}, f"{NONSENSE} (KeyError: 'reason')"),
        (None, NO_GOODBYE),
    ],
)
def test_a_server_that_dies_or_whose_message_makes_no_sense_is_lost_at_once(scripted, message, reason):
    server = scripted(WELCOME, *([message] if message else []))
    group = member(server.address)
    if not message:
        server.connection.shutdown(socket.SHUT_WR)
    assert wait_for(group.first_loss) == LostMember(0, reason)
    with pytest.raises(PeerLostError, match=re.escape(f"'x' cannot complete: rank 0 is lost: {reason}")):
        group.gather("x", 1)
    group.leave()


def test_a_silent_server_is_lost(scripted, monkeypatch):
    Suspension(monkeypatch, "tfdist.coordination.client").pace = 0.5
    server = scripted({**WELCOME, "lost_after": 10.0})
    group = member(server.address, server_rank=LAUNCHER)
    wait_for(group.first_loss)
    assert group.first_loss() == LostMember(
        LAUNCHER, "no heartbeat for 10 s (it is stopped, or its host is unreachable)"
    )
    wait_for(lambda: len(server.heard) > 1)
    assert [message["type"] for message in server.heard[:2]] == ["hello", "beat"]
    group.leave()


def test_a_gather_does_not_wait_for_ever_for_a_server_that_answers_nothing(scripted, monkeypatch):
    monkeypatch.setattr("tfdist.coordination.client.SERVER_GRACE_SECONDS", 0.1)
    group = member(scripted({**WELCOME, "heartbeat": 9.0, "lost_after": 60.0}).address)
    with pytest.raises(PeerLostError, match="rank 0, which serves the group, did not answer 'x' within 0.1 s"):
        group.gather("x", 1, deadline=0.1)
    group.leave()


@pytest.mark.parametrize("sent", [0, 20], ids=["nothing", "a part"])
def test_a_message_whose_sending_is_interrupted_is_the_last_one(job, monkeypatch, sent):
    """The server gets no message after it, whose seal would not be the next one."""
    two = job(2, heartbeat=0.1)
    client = two.members[1]._client
    sock = client._sock

    class Interrupted:
        def sendall(self, data):
            sock.sendall(data[:sent] if b'"publish"' in data else data)
            if b'"publish"' in data:
                raise KeyboardInterrupt

        def __getattr__(self, name):
            return getattr(sock, name)

    monkeypatch.setattr(client, "_sock", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        two.members[1].publish("x", 1)
    wait_for(two.members[0].first_loss)
    assert two.members[0].first_loss() == LostMember(1, NO_GOODBYE)
    wait_for(two.members[1].first_loss)
    assert two.members[1].first_loss().rank == 0  # its own end of the connection


def test_leaving_says_goodbye_last_and_once(scripted):
    server = scripted(WELCOME)
    group = member(server.address)
    group.leave(3, "y" * 5000)
    group.leave(4)
    server.thread.join(DEADLINE)
    assert server.heard[-1] == {"type": "goodbye", "code": 3, "reason": "y" * 1000}
    assert [message["type"] for message in server.heard].count("goodbye") == 1
    with pytest.raises(PeerLostError, match="this process has left the group"):
        group.gather("x", 1)
    assert group.first_loss() is None


def test_a_server_that_closes_at_the_goodbye_is_not_lost(scripted, monkeypatch):
    server = scripted(WELCOME)
    group = member(server.address)
    send = group._client._send

    def slow(line):
        send(line)
        if b"goodbye" in line:  # the server closes before this thread continues
            server.connection.shutdown(socket.SHUT_WR)
            time.sleep(0.2)

    monkeypatch.setattr(group._client, "_send", slow)
    group.leave(75)
    assert group.first_loss() is None


def test_a_callback_may_leave(scripted):
    server = scripted(WELCOME, {"type": "lost", "rank": 0, "reason": "gone", "code": None})
    group = member(server.address)
    left = threading.Event()

    def callback(loss):
        group.leave(5)
        left.set()

    group.on_loss(callback)
    assert left.wait(DEADLINE)


def test_a_member_that_was_stopped_itself_does_not_blame_the_server(scripted, monkeypatch):
    suspension = Suspension(monkeypatch, "tfdist.coordination.client")
    group = member(scripted({**WELCOME, "lost_after": 10.0}).address)
    suspension.suspend(1000.0)
    assert group.first_loss() is None
    suspension.pace = 0.5
    wait_for(group.first_loss)  # but silence is still detected
    group.leave()
