"""The group of a single process, which is also the reference implementation of the contract."""

import json
import secrets
from collections.abc import Callable, Sequence

from tfdist.coordination.authentication import derived
from tfdist.coordination.group import Group, Json, Listener, LostMember, members
from tfdist.coordination.publishing import Publications


class LocalGroup(Group):
    """The group of a single process."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self._publications = Publications("group-publications")
        self._secret = secrets.token_hex(16)

    def gather(self, name: str, value: Json, deadline: float = 60.0) -> list[Json]:
        """See base class."""
        return [_json_round_trip(value)]

    def publish(self, topic: str, value: Json) -> None:
        """See base class."""
        self._publications.put(topic, _json_round_trip(value))

    def subscribe(self, topic: str, callback: Listener) -> None:
        """See base class."""
        self._publications.listen(topic, callback)

    def on_loss(self, callback: Callable[[LostMember], None]) -> None:
        """See base class. There is no other member to lose."""

    def token_for(self, purpose: str) -> str:
        """See base class."""
        return derived(self._secret, purpose)

    def subgroup(self, ranks: Sequence[int]) -> Group:
        """See base class."""
        members(self, ranks)
        return self

    def leave(self, code: int = 0, reason: str = "") -> None:
        """See base class."""
        self._publications.close()


def _json_round_trip(value: Json) -> Json:
    return json.loads(json.dumps(value))  # fails for values that could not be sent between processes
