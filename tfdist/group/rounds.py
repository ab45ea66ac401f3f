"""The gathers that are under way: pure bookkeeping, without sockets, threads or clocks."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tfdist.group.contract import Json, name_ranks
from tfdist.group.messages import Message


class Answer(NamedTuple):
    """A message for a member."""

    rank: int
    message: Message


@dataclasses.dataclass
class Round:
    """One use of a name: who has come, and what the outcome is if it failed.

    Attributes:
      name: the operation's name.
      tickets: by rank, the number by which the member knows its question.
      values: by rank.
      deadline: the shortest in seconds of those that wait, and
      expires: when it is over.
      failure: why it failed, for those who come late; empty while it is open.
    """

    name: str
    tickets: dict[int, int] = dataclasses.field(default_factory=dict)
    values: dict[int, Json] = dataclasses.field(default_factory=dict)
    deadline: float = math.inf
    expires: float = math.inf
    failure: str = ""

    def fail(self, failure: str) -> Iterator[Answer]:
        """Answers all who wait; whoever comes later gets the same outcome."""
        self.failure, self.expires = failure, math.inf
        for rank, ticket in self.tickets.items():
            yield Answer(rank, _failed(ticket, failure))
        self.values.clear()


class Rounds:
    """All rounds of a group. A member's value belongs to the name's oldest round that it has not come to."""

    def __init__(self, size: int, noun: str = "rank", absence: Callable[[list[int]], str] = lambda missing: ""):
        """Args: size: of the group; noun: for members; absence: says more of those who did not come."""
        self._size = size
        self._noun = noun
        self._absence = absence
        self._rounds: dict[str, list[Round]] = {}
        self._gone: dict[int, str] = {}
        self._broken = ""

    def arrive(self, rank: int, ticket: int, name: str, value: Json, deadline: float, now: float) -> list[Answer]:
        """Takes a member's value; returns what is to be answered to whom."""
        if self._broken:
            return [Answer(rank, _failed(ticket, f"'{name}' cannot complete: {self._broken}."))]
        rounds = self._rounds.setdefault(name, [])
        entry = next((one for one in rounds if rank not in one.tickets), None)
        if entry is None:
            rounds.append(entry := Round(name))
        entry.tickets[rank] = ticket
        answers: list[Answer] = []
        if entry.failure:
            answers = [Answer(rank, _failed(ticket, entry.failure))]
        else:
            entry.values[rank] = value
            if now + deadline < entry.expires:
                entry.deadline, entry.expires = deadline, now + deadline
            answers = self._outcome(entry)
        if len(entry.tickets) == self._size:
            rounds.remove(entry)
        if not rounds:
            del self._rounds[name]
        return answers

    def expire(self, now: float) -> list[Answer]:
        """Fails the rounds whose time is over."""
        answers: list[Answer] = []
        for entry in self._open():
            if entry.expires <= now:
                missing = self._missing(entry)
                names = name_ranks(missing, self._noun)
                failure = f"{names} did not reach '{entry.name}' within {entry.deadline:g} s{self._absence(missing)}."
                answers += entry.fail(failure)
        return answers

    def next_expiry(self) -> float:
        """When `expire` will have something to do."""
        return min((entry.expires for entry in self._open()), default=math.inf)

    def member_left(self, rank: int, how: str) -> list[Answer]:
        """A member will not come to anything any more, though nothing is wrong with it."""
        self._gone[rank] = how
        return [answer for entry in self._open() for answer in self._outcome(entry)]

    def break_off(self, reason: str) -> list[Answer]:
        """Fails everything that is under way, and everything to come."""
        self._broken = reason
        answers = [a for entry in self._open() for a in entry.fail(f"'{entry.name}' cannot complete: {reason}.")]
        self._rounds.clear()
        return answers

    def _open(self) -> Iterable[Round]:
        return [entry for rounds in self._rounds.values() for entry in rounds if not entry.failure]

    def _missing(self, entry: Round) -> list[int]:
        return [rank for rank in range(self._size) if rank not in entry.tickets]

    def _outcome(self, entry: Round) -> list[Answer]:
        missing = self._missing(entry)
        if not missing:
            values = [entry.values[rank] for rank in range(self._size)]
            return [
                Answer(rank, {"type": "values", "ticket": ticket, "values": values})
                for rank, ticket in entry.tickets.items()
            ]
        for rank in missing:
            if rank in self._gone:
                failure = f"'{entry.name}' cannot complete: {self._noun} {rank} {self._gone[rank]}."
                return list(entry.fail(failure))
        return []


def _failed(ticket: int, failure: str) -> Message:
    return {"type": "failed", "ticket": ticket, "failure": failure}
