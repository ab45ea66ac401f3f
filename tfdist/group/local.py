"""The group of one process: nobody to wait for, nobody to lose. Also the contract by example."""

import json
from collections.abc import Callable

from tfdist.group.contract import Group, Json, Loss


class LocalGroup(Group):
    """The group of one process."""

    rank = 0
    size = 1
    generation = 0

    def gather(self, name: str, value: Json, deadline: float = 60.0) -> list[Json]:
        """See base class."""
        return [json.loads(json.dumps(value))]  # what does not travel between processes, does not here

    def on_loss(self, callback: Callable[[Loss], None]) -> None:
        """See base class: there is nobody to lose."""

    def leave(self, code: int = 0, reason: str = "") -> None:
        """See base class."""
