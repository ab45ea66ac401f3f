"""Horovod's rendezvous server, as ranks use it, and as untrusted clients do."""

import contextlib
import http.client
import socket

import pytest

pytest.importorskip("horovod")

from horovod.runner.common.util import hosts

from tests.waiting import DEADLINE, wait_for
from tfdist.coordination import horovod_store
from tfdist.coordination.job_token import LOOPBACK

pytestmark = [pytest.mark.processes, pytest.mark.waits]

SLOTS = hosts.get_host_assignments([hosts.HostInfo("a", 2)], 2, 2)


def ask(port: int, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None):
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=DEADLINE)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_it_keeps_what_ranks_write():
    with horovod_store.running_server(LOOPBACK, SLOTS) as port:
        assert ask(port, "PUT", "/global/0", b"address") == (200, b"")
        assert ask(port, "GET", "/global/0") == (200, b"address")
        assert ask(port, "GET", "/global/1")[0] == 404
        assert ask(port, "DELETE", "/own/0")[0] == 200
    with pytest.raises(OSError):
        ask(port, "GET", "/global/0")


@pytest.mark.parametrize(
    ("method", "path", "body", "headers", "status"),
    [
        ("PUT", "/a", b"x", {}, 400),
        ("PUT", "/a/b/c", b"x", {}, 400),
        ("GET", "/a/b/c", None, {}, 400),
        ("DELETE", "/", None, {}, 400),
        ("PUT", f"/{'a' * 300}/b", b"x", {}, 400),
        ("PUT", "/a/b", b"x", {"Content-Length": str(10**12)}, 413),
        ("PUT", "/a/b", b"x", {"Content-Length": "-1"}, 413),
        ("PUT", "/a/b", b"x", {"Content-Length": str((1 << 20) + 1)}, 413),
        ("HEAD", "/setup.cfg", None, {}, 405),
    ],
)
def test_what_no_rank_writes_is_refused(method, path, body, headers, status, capfd):
    with horovod_store.running_server(LOOPBACK, SLOTS) as port:
        assert ask(port, method, path, body, headers)[0] == status
        assert ask(port, "PUT", "/global/0", b"address") == (200, b"")
    assert capfd.readouterr().err == ""


def test_its_size_is_limited(monkeypatch):
    monkeypatch.setattr(horovod_store, "_KEYS", -190)  # 10 remain in addition to those of two ranks
    with horovod_store.running_server(LOOPBACK, SLOTS) as port:
        found = [ask(port, "PUT", f"/a/{number}", b"x")[0] for number in range(12)]
    assert found == [200] * 10 + [507] * 2


def served(port):
    """Returns the answer to a request, or None while there are too many connections."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        return ask(port, "PUT", "/global/0", b"address")


def test_connections_are_limited_and_silent_ones_closed(monkeypatch):
    monkeypatch.setattr(horovod_store, "MAX_CONNECTIONS", 4)
    with horovod_store.running_server(LOOPBACK, SLOTS) as port:
        silent = [socket.create_connection((LOOPBACK, port), timeout=DEADLINE) for _ in range(6)]
        closed = 0
        for sock in silent[4:]:
            closed += sock.recv(1) == b""
        assert closed == 2
        assert silent[0].recv(1) == b""  # after Horovod's limit of 3 s for a request
        for sock in silent:
            sock.close()
        assert wait_for(lambda: served(port)) == (200, b"")


def test_the_bytes_that_it_keeps_are_limited(monkeypatch):
    monkeypatch.setattr(horovod_store, "_BYTES", 0)
    with horovod_store.running_server(LOOPBACK, SLOTS) as port:
        assert ask(port, "PUT", "/global/0", b"x" * 3000)[0] == 200
        assert ask(port, "PUT", "/global/1", b"x" * 3000)[0] == 507
        assert ask(port, "PUT", "/global/2", b"x" * 1000)[0] == 200
