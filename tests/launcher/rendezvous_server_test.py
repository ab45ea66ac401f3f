"""The rendezvous server and remote launchers, in one process, over real sockets."""

import socket
import time
from collections.abc import Iterator

import pytest

from tests.waiting import DEADLINE, wait_for
from tfdist.coordination.calls import Connection
from tfdist.coordination.job_token import join_address, listen, split_address
from tfdist.errors import InputError, PeerLostError
from tfdist.launcher import orders, rendezvous_server
from tfdist.launcher.job import Job, Outcome
from tfdist.launcher.job_controller import JobController
from tfdist.launcher.orders import OrderKind, Report
from tfdist.launcher.rendezvous_server import RemoteAgent, RendezvousServer

pytestmark = [pytest.mark.processes, pytest.mark.waits, pytest.mark.usefixtures("no_thread_is_left")]


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
        self.controller = JobController(self.job, self.said.append, lambda: self.listed)
        self.controller.add_launcher("own", ["here"])
        self.rendezvous_server = RendezvousServer(listener, "127.0.0.1", "token", self.controller)

    def remote_agent(self, token: str = "token") -> RemoteAgent:
        return RemoteAgent(self.job, token)

    def finish(self) -> None:
        """Ends the job, whose own launcher has reported."""
        self.controller.end(Outcome(0))
        self.controller.record_report("own", Report(Outcome(0)))

    def wait_for_guest(self) -> None:
        """Waits until the controller knows of a guest: an attempt would begin without it."""
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
        assert own.address == other.address
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


def test_a_guest_that_is_silent_is_lost(monkeypatch) -> None:
    monkeypatch.setattr(rendezvous_server, "LOST_AFTER_SECONDS", 0.3)
    opened = Open()
    with opened.rendezvous_server:
        silent = Connection(opened.address, "token", "server")
        silent.call("join", {"places": []})
        wait_for(lambda: any("is lost: no heartbeat for 0.3 s" in line for line in opened.said))
        silent.close()
        opened.finish()


def test_a_lobby_that_is_silent_is_lost(opened, monkeypatch) -> None:
    with opened.remote_agent() as agent:
        monkeypatch.setattr(rendezvous_server, "LOST_AFTER_SECONDS", 0.3)
        with opened.controller._lock:  # as if its launcher were suspended
            wait_for(lambda: "no heartbeat for 0.3 s" in agent.order().outcome.reason)


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


def test_a_guest_with_another_token_is_refused(opened) -> None:
    with pytest.raises(InputError, match="The token must match"):
        opened.remote_agent("another")
    assert opened.said == []


@pytest.mark.parametrize("is_guest", [True, False])
def test_whoever_stays_connected_does_not_hold_up_the_end(is_guest, monkeypatch) -> None:
    monkeypatch.setattr(rendezvous_server, "LOST_AFTER_SECONDS", 1.0)
    opened = Open()
    with socket.create_connection(split_address(opened.address)):
        connection = Connection(opened.address, "token", "server")
        if is_guest:
            connection.call("report", orders.encode(Report(Outcome(0))))
        opened.finish()
        began = time.monotonic()
        with opened.rendezvous_server:
            pass
        assert time.monotonic() - began < DEADLINE / 2


def test_a_lobby_that_is_not_there_is_said(opened) -> None:
    job = Job(processes=2, min_processes=1, hosts="x", coordinator="127.0.0.1:1", start_timeout_seconds=0.3)
    with pytest.raises(PeerLostError, match="the coordinator's launcher did not answer at 127.0.0.1:1 within 0.3 s"):
        RemoteAgent(job, "token")
