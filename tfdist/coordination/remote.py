"""A group that is served by another process or thread, and its subgroups."""

from collections.abc import Callable, Sequence
from typing import Any

from tfdist.coordination.client import Client, Ranks
from tfdist.coordination.group import Group, Json, Listener, LostMember, members


class _ClientGroup(Group):
    """Some or all members of a job, which communicate through this process's client."""

    def __init__(self, client: Client, ranks: Ranks):
        self._client = client
        self._ranks = ranks
        self.rank, self.size = ranks.index(client.rank), len(ranks)

    @property
    def ranks(self) -> Ranks:
        """See base class."""
        return self._ranks

    @property
    def goodbye_code(self) -> int | None:
        """See base class."""
        return self._client.goodbye_code

    def gather(self, name: str, value: Json, deadline: float = 60.0) -> list[Json]:
        """See base class."""
        return self._client.gather(self.ranks, name, value, deadline)

    def publish(self, topic: str, value: Json) -> None:
        """See base class."""
        self._client.publish(self.ranks, topic, value)

    def subscribe(self, topic: str, callback: Listener) -> None:
        """See base class."""
        self._client.subscribe(self.ranks, topic, callback)

    def token_for(self, purpose: str) -> str:
        """See base class."""
        return self._client.token_for(purpose)

    def on_loss(self, callback: Callable[[LostMember], None]) -> None:
        """See base class."""
        self._client.on_loss(self.ranks, callback)

    def lost(self, wait: float = 0.0) -> LostMember | None:
        """See base class."""
        return self._client.lost(self.ranks, wait)

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """See base class."""
        return _ClientGroup(self._client, tuple(self.ranks[member] for member in members(self, ranks)))

    def leave(self, code: int = 0, reason: str = "") -> None:
        """See base class."""
        self._client.leave(code, reason)


class RemoteGroup(_ClientGroup):
    """All members of a job, which communicate through a `Server`."""

    def __init__(self, address: str, *, rank: int, size: int, **arguments: Any):
        """Connects to the server; see `Client` for the arguments."""
        super().__init__(Client(address, rank=rank, size=size, **arguments), tuple(range(size)))
