"""Horovod's rendezvous server, as ranks use it."""

import http.client

import pytest

pytest.importorskip("horovod")

from horovod.runner.common.util import hosts

from tests.waiting import DEADLINE
from tfdist.coordination import horovod_store
from tfdist.coordination.job_token import LOOPBACK

pytestmark = [pytest.mark.processes, pytest.mark.waits]

SLOTS = hosts.get_host_assignments([hosts.HostInfo("a", 2)], 2, 2)


def ask(port: int, method: str, path: str, body: bytes | None = None):
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=DEADLINE)
    try:
        connection.request(method, path, body)
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
