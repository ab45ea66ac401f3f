"""Arbitrary bytes and messages for the control plane: `make fuzz` sends many, `make test` a few.

Whatever arrives, no thread dies of it, the members that it does not concern continue, and nothing is left of it.
"""

import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.arbitrary import TEXTS, VALUES, near
from tests.coordination.members import Job
from tests.coordination.wire import HELLO
from tests.waiting import DEADLINE
from tfdist.coordination.job_token import split_address
from tfdist.coordination.messages import encode

pytestmark = [pytest.mark.processes, pytest.mark.waits, pytest.mark.fuzz]

fuzzed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

FIELDS = "code deadline doubt host name nonce pid place rank ranks reason size ticket topic type value values".split()
TYPES = "hello join gather publish doubt beat goodbye".split()


def messages(types: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Messages with one of the types, or another one, and any fields."""
    fields = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6)
    return st.builds(lambda kind, more: {**more, "type": kind}, st.sampled_from(types) | TEXTS, fields)


RAW = (
    st.binary(max_size=300)
    | st.lists(messages(TYPES) | near(HELLO), max_size=3).map(lambda all_of_them: b"".join(map(encode, all_of_them)))
    | st.tuples(near(HELLO).map(encode), st.binary(max_size=100)).map(b"".join)
)


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Asserts that no thread has died of an exception, no error was logged, and no descriptor is left open."""
    died: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda hooked: died.append(f"{hooked.thread}: {hooked.exc_value!r}"))
    before = psutil.Process().num_fds()
    yield
    assert not died and not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert psutil.Process().num_fds() <= before + 8


def send(address: str, data: bytes) -> bytes:
    """Sends bytes to a server; returns what it answers until it closes the connection."""
    with socket.create_connection(split_address(address), timeout=DEADLINE) as sock, sock.makefile("rb") as answers:
        with contextlib.suppress(OSError):  # the server may have closed it
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
        try:
            return answers.read()
        except ConnectionResetError:
            return b""


@pytest.fixture
def pair(job: Callable[..., Job]) -> Iterator[Job]:
    """A group of two members, which needs no more memory whatever happens."""
    two = job(2)
    memory = psutil.Process().memory_info().rss
    yield two
    assert psutil.Process().memory_info().rss <= memory + (200 << 20)


@fuzzed
@given(raw=RAW)
@example(raw=b"GET / HTTP/1.1\r\n\r\n")
@example(raw=b"x" * 5000)
@example(raw=b"")
@example(raw=encode({"type": "gather", "ticket": 1}))
@example(raw=b'{"type": "hello", "rank": ' + b"9" * 4000 + b"}\n")
@example(raw=b"[" * 4000 + b"\n")
def test_bytes_of_an_untrusted_client(pair: Job, raw: bytes) -> None:
    for line in send(pair.server.address, raw).splitlines():
        assert json.loads(line)["type"] in ("challenge", "refused")
    assert pair.all(lambda m: m.gather("x", m.rank)) == [[0, 1]] * 2
