"""The contract `Group`: what the processes of a job may say to each other outside every graph."""

import abc
import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from tfdist.errors import InputError

NO_GOODBYE = "its connection closed without a goodbye (killed, crashed, or it ended silently)"
LAUNCHER = -1  # the number by which a launcher that serves a group is known

Json = Any  # None, bool, int, float, str, and lists and string-keyed dicts of them
Listener = Callable[[Json], object]  # whoever returns True has heard enough


@dataclasses.dataclass(frozen=True)
class Loss:
    """A member that is gone, and what is known of how it went.

    Attributes:
      rank: the member's number; `LAUNCHER` for a launcher, which serves the group and is no member.
      reason: what is known, as the end of a sentence: "its connection closed without a goodbye".
      code: the exit code that it said goodbye with; None if it went without a word.
      noun: what a member is called.
    """

    rank: int
    reason: str
    code: int | None = None
    noun: str = "rank"

    def __str__(self) -> str:
        return f"{name_member(self.rank, self.noun)} is lost: {self.reason}"


class Group(abc.ABC):
    """All processes of a job, seen from one of them.

    Every operation but `tell` is collective: all ranks call it with the same name, in any order between different names,
    from any thread. A name is used once at a time, and may be used again afterwards. An operation has one outcome for all:
    if it is not complete when the shortest `deadline` (seconds) of those who wait is over, it raises `PeerLostError`
    on every rank, naming those that did not come; so it does when a member is lost, or left, before it is complete.

    Attributes:
      rank: this process's number, in [0, size).
      size: how many members the group has.
      left_with: the code with which this member has said goodbye; None before.
    """

    rank: int
    size: int
    left_with: int | None = None

    @abc.abstractmethod
    def gather(self, name: str, value: Json, deadline: float = 60.0) -> list[Json]:
        """Returns every rank's value, in the order of ranks, to every rank.

        Args:
          name: the same on every rank.
          value: at most 1 MiB as JSON; tuples arrive as lists.
          deadline: in seconds, from when this rank's value arrives.

        Raises:
          PeerLostError: a rank did not come, or is lost.
          InputError: the value is too large.
        """

    def barrier(self, name: str, deadline: float = 60.0) -> None:
        """Returns when every rank has called it."""
        self.gather(name, None, deadline)

    def broadcast(self, name: str, value: Json, deadline: float = 60.0, root: int = 0) -> Json:
        """Returns the root's value to every rank; the others' values are ignored."""
        return self.gather(name, value if self.rank == root else None, deadline)[root]

    def agree(self, name: str, value: Mapping[str, Json], what: str = "", deadline: float = 60.0) -> None:
        """Returns if every rank's mapping is the same.

        Args:
          name: the operation's name, the same on every rank.
          value: what must be the same, by key: flags, versions.
          what: stands before a key in the message: "flag --" makes of the key `seed` "flag --seed differs: ...".
          deadline: in seconds.

        Raises:
          InputError: on every rank, naming the first key that differs and which ranks have which value.
        """
        everyone = self.gather(name, dict(value), deadline)
        for key in sorted({key for one in everyone for key in one}):
            ranks: dict[str, list[int]] = {}
            for rank, one in enumerate(everyone):
                ranks.setdefault(json.dumps(one[key], sort_keys=True) if key in one else "nothing", []).append(rank)
            if len(ranks) > 1:
                said = ", ".join(f"{name_ranks(held)} {_has(held)} {text}" for text, held in ranks.items())
                raise InputError(f"{what}{key} differs: {said}. Start every process with the same.")

    @abc.abstractmethod
    def tell(self, topic: str, value: Json) -> None:
        """Tells every member, this one included, without waiting; from any rank and any thread.

        All members hear all that is told, whoever told it, in one order, the same for everyone. Once the group has
        ended nobody hears it.

        Args:
          topic: whom it is for, see `on_told`.
          value: at most 1 MiB as JSON; tuples arrive as lists.

        Raises:
          InputError: the value is too large.
        """

    @abc.abstractmethod
    def on_told(self, topic: str, callback: Listener) -> None:
        """Calls back with each value that is told of a topic, from the first one on, also of the time before this call.

        Values come one after another, in the order of telling, from a thread of the group that all topics share: a
        callback must return soon, and wait for no other rank. If it returns True it is done: what is told of the topic
        from there on is for the next one that registers, or has registered.
        """

    @abc.abstractmethod
    def on_loss(self, callback: Callable[[Loss], None]) -> None:
        """Calls back, from another thread and at most once, when the first member is lost (at once if one is)."""

    def lost(self, wait: float = 0.0) -> Loss | None:
        """Returns the first loss.

        Args:
          wait: in seconds, for the news, which an engine's error may outrun; to be given after such an error only.
        """
        return None

    @abc.abstractmethod
    def leave(self, code: int = 0, reason: str = "") -> None:
        """Says goodbye: a member that leaves with code 0 is not lost; nor with 75, which all agree on.

        Any other code is told to the others.
        """


def name_member(rank: int, noun: str = "rank") -> str:
    """Returns `rank 2`, or `the launcher`."""
    return "the launcher" if rank == LAUNCHER else f"{noun} {rank}"


def name_ranks(ranks: list[int], noun: str = "rank") -> str:
    """Returns `rank 2` or `ranks 2, 5`."""
    return f"{noun}{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _has(ranks: list[int]) -> str:
    return "have" if len(ranks) > 1 else "has"


def silence(seconds: float) -> str:
    """Returns the reason of a loss that only silence tells of."""
    return f"no sign of life for {seconds:g} s (it is stopped, or its host is unreachable)"
