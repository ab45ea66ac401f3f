"""The rendezvous server and remote launchers, in one process, over real sockets."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.coordination.client_test import Scripted
from tests.coordination.wire import Wire, drip
from tests.waiting import DEADLINE, wait_for
from tfdist.coordination.job_token import join_address, listen, split_address
from tfdist.coordination.messages import VERSION, encode
from tfdist.errors import InputError, PeerLostError
from tfdist.launcher import order_sources, orders, rendezvous_server
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.job_controller import JobController
from tfdist.launcher.order_sources import RemoteAgent
from tfdist.launcher.orders import OrderKind, Report
from tfdist.launcher.rendezvous_server import RendezvousServer

pytestmark = [pytest.mark.processes, pytest.mark.waits, pytest.mark.usefixtures("no_thread_is_left")]


HELLO = {"type": "hello", "version": VERSION, "nonce": "n", "places": []}


class Open:
    """A rendezvous server whose job controller also has a local launcher."""

    def __init__(self) -> None:
        listener = listen("127.0.0.1:0", "")
        self.address = join_address(*listener.getsockname()[:2])
        self.job = Job(
            processes=3, min_processes=1, hosts="list", coordinator=self.address, start_timeout_seconds=DEADLINE
        )
        self.said: list[str] = []
        self.listed = {"here": 2, "127.0.0.1": 1}
        self.rendezvous_server = RendezvousServer(listener, "127.0.0.1", "token")
        self.controller = JobController(self.job, self.said.append, lambda: self.listed)
        self.controller.open_group = self.rendezvous_server.open_group
        self.controller.add_launcher("own", ["here"])
        self.rendezvous_server.open(self.controller)

    def remote_agent(self, token: str = "token") -> RemoteAgent:
        return RemoteAgent(self.job, token)

    def finish(self) -> None:
        """Ends the job, whose own launcher has reported."""
        self.controller.end(Outcome(0))
        self.controller.record_report("own", Report(Outcome(0)))

    def wait_for_guest(self) -> None:
        """Waits until the controller knows of a guest, which is welcomed before: an attempt would begin without it."""
        wait_for(lambda: any("has joined" in line for line in self.said))


@pytest.fixture
def opened() -> Iterator[Open]:
    made = Open()
    with made.rendezvous_server:
        yield made
        made.finish()


def test_a_guest_gets_its_orders_and_reports(opened) -> None:
    with opened.remote_agent() as remote_agent:
        opened.wait_for_guest()
        wait_for(
            lambda: opened.controller.order("own").kind == OrderKind.RUN and remote_agent.order().kind == OrderKind.RUN
        )
        own, other = opened.controller.order("own"), remote_agent.order()
        assert (own.node, own.processes, other.node, other.processes, own.nodes) == (0, 2, 1, 1, 2)
        assert own.address == other.address and own.purpose == other.purpose
        opened.controller.record_report("own", Report(Outcome(0)))
        remote_agent.report(Report(Outcome(0)))
        wait_for(lambda: remote_agent.order().kind == OrderKind.OVER)
        assert remote_agent.order().outcome.code == 0


def test_a_guest_that_leaves_is_gone(opened) -> None:
    with opened.remote_agent() as remote_agent:
        wait_for(lambda: remote_agent.order().kind == OrderKind.RUN)
        remote_agent.report(Report(Outcome(75), stopped=True))
        assert remote_agent.order().kind == OrderKind.OVER
        wait_for(lambda: any("has left the job" in line for line in opened.said))


def test_a_guest_that_vanishes_is_lost_and_the_others_stop(opened) -> None:
    with opened.remote_agent() as remote_agent:
        opened.wait_for_guest()
        wait_for(
            lambda: remote_agent.order().kind == OrderKind.RUN and opened.controller.order("own").kind == OrderKind.RUN
        )
    wait_for(lambda: opened.controller.order("own").kind == OrderKind.STOP)
    assert "is lost" in opened.controller.order("own").outcome.reason


@pytest.mark.parametrize("drips", [False, True])
def test_a_guest_that_is_silent_or_sends_bytes_that_make_no_message_is_lost(drips, opened, monkeypatch) -> None:
    def is_lost() -> bool:
        return any("no heartbeat for 0.3 s" in line for line in opened.said)

    monkeypatch.setattr(rendezvous_server, "LOST_AFTER_SECONDS", 0.3)
    with Wire(opened.address, HELLO, "token") as wire:
        drip(wire.sock, until=is_lost) if drips else wait_for(is_lost)
        assert is_lost()


def test_bytes_that_make_no_message_do_not_hide_a_lost_lobby(monkeypatch) -> None:
    monkeypatch.setattr(order_sources, "LOST_AFTER_SECONDS", 0.3)
    with contextlib.closing(Scripted({"type": "welcome"})) as server:
        job = Job(processes=2, min_processes=1, hosts="x", coordinator=server.address, start_timeout_seconds=DEADLINE)
        with RemoteAgent(job, "t") as agent:
            drip(server.connection)
            assert "no heartbeat for 0.3 s" in agent.order().outcome.reason


def test_the_end_of_the_lobby_stops_a_guest_that_runs() -> None:
    opened = Open()
    with opened.rendezvous_server:
        remote_agent = opened.remote_agent()
        wait_for(lambda: remote_agent.order().kind == OrderKind.RUN)
    with remote_agent:
        wait_for(lambda: remote_agent.order().kind == OrderKind.STOP)
        assert "the coordinator's launcher is lost" in remote_agent.order().outcome.reason
        remote_agent.report(Report(Outcome(5)))
        assert remote_agent.order().kind == OrderKind.OVER


def test_untrusted_clients_are_refused(opened) -> None:
    with pytest.raises(InputError, match="The token must match"):
        opened.remote_agent("another")
    host, port = split_address(opened.address)
    for said in (b"GET / HTTP/1.1\r\n\r\n", encode({"type": "hello", "version": VERSION}), b"x" * 10000):
        with socket.create_connection((host, port)) as sock:
            sock.settimeout(DEADLINE)
            sock.sendall(said)
            assert sock.recv(100) == b""
    with socket.create_connection((host, port)) as sock:
        sock.sendall(encode({"type": "hello", "version": VERSION + 1, "token": "token", "places": []}))
        assert b"Received: version 2, where the job" in sock.recv(1000)
    assert opened.said == []


def test_whoever_drips_is_closed_at_a_fixed_time(opened, monkeypatch) -> None:
    monkeypatch.setattr(rendezvous_server, "HELLO_SECONDS", 1.0)
    with socket.create_connection(split_address(opened.address)) as sock:
        began = time.monotonic()
        drip(sock)
        assert time.monotonic() - began < DEADLINE / 2


def test_a_guest_that_never_ends_does_not_hold_up_the_end(opened, monkeypatch) -> None:
    monkeypatch.setattr(rendezvous_server, "HELLO_SECONDS", 0.5)
    with Wire(opened.address, HELLO, "token") as wire:
        wire.receive()
        opened.finish()
        wire.send(orders.encode_report(Report(Outcome(0))))
        dripping = threading.Thread(target=drip, args=(wire.sock,))
        dripping.start()
        began = time.monotonic()
        opened.rendezvous_server.__exit__(None, None, None)
        assert time.monotonic() - began < DEADLINE / 2
        dripping.join()


def test_untrusted_clients_are_limited_in_number_and_hold_up_neither_launchers_nor_the_end(opened, monkeypatch) -> None:
    monkeypatch.setattr(rendezvous_server, "MAX_UNAUTHENTICATED", 4)
    monkeypatch.setattr(rendezvous_server, "HELLO_SECONDS", DEADLINE)
    with contextlib.ExitStack() as stack:
        address = split_address(opened.address)
        clients = [stack.enter_context(socket.create_connection(address)) for _ in range(20)]
        for sock in clients[:16]:
            sock.settimeout(DEADLINE)
            assert sock.recv(1) == b""
        with opened.remote_agent() as remote_agent:
            wait_for(lambda: remote_agent.order().kind == OrderKind.RUN)
            opened.finish()
            remote_agent.report(Report(Outcome(0)))
            wait_for(lambda: remote_agent.order().kind == OrderKind.OVER)
        began = time.monotonic()
        opened.rendezvous_server.__exit__(None, None, None)
        assert time.monotonic() - began < DEADLINE / 2


def test_a_lobby_that_is_not_there_is_said(opened) -> None:
    job = Job(processes=2, min_processes=1, hosts="x", coordinator="127.0.0.1:1", start_timeout_seconds=0.3)
    with pytest.raises(PeerLostError, match="the coordinator's launcher did not answer at 127.0.0.1:1 within 0.3 s"):
        RemoteAgent(job, "token")
