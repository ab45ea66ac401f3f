import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.waiting import DEADLINE
from tfdist.coordination import RemoteGroup, Server
from tfdist.coordination.job_token import listen

TOKEN = "the job's token"


class Job:
    """A server and its members in this process."""

    def __init__(self, size: int, **server: Any):
        self.size = size
        self.server = Server(listen("127.0.0.1:0", ""), size=size, token=TOKEN, **server)
        self.members: dict[int, RemoteGroup] = {}
        self._pool = ThreadPoolExecutor(max_workers=32)

    def join(self, rank: int, **arguments: Any) -> RemoteGroup:
        all_arguments: dict[str, Any] = {"size": self.size, "token": TOKEN, "timeout": DEADLINE} | arguments
        member = RemoteGroup(self.server.address, rank=rank, **all_arguments)
        self.members[rank] = member
        return member

    def start(self, call: Callable[..., Any], *arguments: Any) -> Future:
        return self._pool.submit(call, *arguments)

    def all(self, call: Callable[[RemoteGroup], Any]) -> list[Any]:
        """Returns each rank's result of a call that all ranks make concurrently."""
        calls = [self.start(call, self.members[rank]) for rank in sorted(self.members)]
        return [one.result(DEADLINE) for one in calls]

    def close(self) -> None:
        for member in self.members.values():
            member.leave()
        self.server.close()
        self._pool.shutdown()


@pytest.fixture(autouse=True)
def every_thread_ends(no_thread_is_left: None) -> None:
    """Applies `no_thread_is_left` to every test in this directory."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets members wait for a server of a test, a thread that may not run for seconds, longer than for a real one."""
    monkeypatch.setattr("tfdist.coordination.client.SERVER_GRACE_SECONDS", DEADLINE)
    monkeypatch.setattr("tfdist.coordination.client.JOIN_SECONDS", DEADLINE)


@pytest.fixture
def job() -> Iterator[Callable[..., Job]]:
    with contextlib.ExitStack() as stack:

        def create(size: int, members: bool = True, **server: Any) -> Job:
            made = Job(size, **server)
            stack.callback(made.close)
            for rank in range(size if members else 0):
                made.join(rank)
            return made

        yield create
