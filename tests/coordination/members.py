"""Groups over TCP whose members are all in this process."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tests.waiting import DEADLINE
from tfdist.coordination import RemoteGroup, Server
from tfdist.coordination.job_token import listen
from tfdist.errors import InputError, PeerLostError


@contextlib.contextmanager
def members(size: int) -> Iterator[list[RemoteGroup]]:
    """Yields a member for each rank; on exit they leave, and the server closes."""
    with contextlib.ExitStack() as stack:
        server = Server(listen("127.0.0.1:0", ""), size=size, token="token")
        stack.callback(server.close)
        joined = [
            RemoteGroup(server.address, rank=rank, size=size, token="token", timeout=DEADLINE) for rank in range(size)
        ]
        for member in joined:
            stack.callback(member.leave)
        yield joined


def outcome(call: Callable[..., Any], *arguments: Any) -> Any:
    """Returns what a call returns, or the text of its error."""
    try:
        return call(*arguments)
    except (InputError, PeerLostError) as error:
        return str(error)
