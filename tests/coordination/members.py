"""Groups over TCP whose members are all in this process."""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tests.waiting import DEADLINE
from tfdist.coordination import RemoteGroup, Server
from tfdist.coordination.job_token import listen
from tfdist.coordination.server import HEARTBEAT_SECONDS, LOST_AFTER_SECONDS
from tfdist.errors import InputError, PeerLostError

TOKEN = "the job's token"


class Job:
    """A server and its members."""

    def __init__(self, size: int, heartbeat: float = HEARTBEAT_SECONDS, lost_after: float = LOST_AFTER_SECONDS):
        self.size = size
        self.server = Server(listen("127.0.0.1:0", ""), size=size, token=TOKEN)
        self.server._heartbeat, self.server._lost_after = heartbeat, lost_after
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


@contextlib.contextmanager
def members(size: int) -> Iterator[list[RemoteGroup]]:
    """Yields a member for each rank; on exit they leave, and the server closes."""
    with contextlib.closing(Job(size)) as job:
        yield [job.join(rank) for rank in range(size)]


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a call returns, or the text of its error."""
    try:
        return call(*arguments)
    except (InputError, PeerLostError) as error:
        return str(error)
