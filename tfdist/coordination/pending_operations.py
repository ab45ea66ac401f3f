"""The gathers that are under way: pure bookkeeping, without sockets, threads or clocks."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tfdist.coordination.group import Json, name_ranks
from tfdist.coordination.messages import Message

STANDSTILL_SECONDS = 10.0  # for which all wait for each other before it is said to be so
REPORTED_SECONDS = 20.0  # after which who waits is told for whom


class Answer(NamedTuple):
    """A message for a member."""

    rank: int
    message: Message


@dataclasses.dataclass
class PendingOperation:
    """One use of a name: who has come, and what the outcome is if it failed.

    Attributes:
      name: the operation's name.
      tickets: by rank, the number by which the member knows its question.
      values: by rank.
      deadline: the shortest in seconds of those that wait, and
      expires: when it is over.
      failure: why it failed, for those who come late; empty while it is open.
      places: by rank, where in its program it waits, of those whose main thread does.
      began: when the first one came.
      is_reported: whether those that wait know whom they wait for.
      is_misuse: whether it failed because of what the ranks' programs do.
    """

    name: str
    tickets: dict[int, int] = dataclasses.field(default_factory=dict)
    values: dict[int, Json] = dataclasses.field(default_factory=dict)
    deadline: float = math.inf
    expires: float = math.inf
    failure: str = ""
    places: dict[int, str] = dataclasses.field(default_factory=dict)
    began: float = math.inf
    is_reported: bool = False
    is_misuse: bool = False

    def fail(self, failure: str, is_misuse: bool = False) -> Iterator[Answer]:
        """Answers all who wait; whoever comes later gets the same outcome."""
        self.failure, self.expires, self.is_misuse = failure, math.inf, is_misuse
        for rank, ticket in self.tickets.items():
            yield Answer(rank, _failed(ticket, failure, is_misuse))
        self.values.clear()


class PendingOperations:
    """All rounds of a group. A member's value belongs to the name's oldest round that it has not come to."""

    def __init__(self, size: int, noun: str = "rank", absence: Callable[[list[int]], str] = lambda missing: ""):
        """Args: size: of the group; noun: for members; absence: says more of those who did not come."""
        self._size = size
        self._noun = noun
        self._absence = absence
        self._rounds: dict[str, list[PendingOperation]] = {}
        self._gone: dict[int, str] = {}
        self._broken = ""
        self._still_since = math.inf  # when the last one came, if all wait and nobody can come

    def arrive(
        self, rank: int, ticket: int, name: str, value: Json, deadline: float, now: float, place: str = ""
    ) -> list[Answer]:
        """Takes a member's value; returns what is to be answered to whom.

        Args:
          rank: the member's.
          ticket: by which the member knows its question.
          name: of the operation.
          value: the member's.
          deadline: seconds that it waits.
          now: the time.
          place: where in its program its main thread waits; empty if another thread does.
        """
        if self._broken:
            return [Answer(rank, _failed(ticket, f"'{name}' cannot complete: {self._broken}."))]
        rounds = self._rounds.setdefault(name, [])
        entry = next((one for one in rounds if rank not in one.tickets), None)
        if entry is None:
            rounds.append(entry := PendingOperation(name))
        entry.tickets[rank] = ticket
        entry.began = min(entry.began, now)
        if place:
            entry.places[rank] = place
        answers: list[Answer] = []
        if entry.failure:
            answers = [Answer(rank, _failed(ticket, entry.failure, entry.is_misuse))]
        else:
            entry.values[rank] = value
            if now + deadline < entry.expires:
                entry.deadline, entry.expires = deadline, now + deadline
            answers = self._outcome(entry)
        if len(entry.tickets) == self._size:
            rounds.remove(entry)
        if not rounds:
            del self._rounds[name]
        self._still_since = now if self._stand_still() else math.inf
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
        if self._still_since + STANDSTILL_SECONDS <= now:
            answers += self._end_standstill()
        return answers

    def late(self, now: float) -> list[Answer]:
        """Tells those who have waited long, once, for whom."""
        found = [one for one in self._open() if not one.is_reported and one.began + REPORTED_SECONDS <= now]
        answers = []
        for entry in found:
            entry.is_reported = True
            missing = name_ranks(self._missing(entry), self._noun)
            answers += [
                Answer(rank, {"type": "waiting", "name": entry.name, "missing": missing, "place": place})
                for rank, place in entry.places.items()
            ]
        return answers

    def next_expiry(self) -> float:
        """When `expire` will have something to do."""
        return min((entry.expires for entry in self._open()), default=math.inf)

    def _waiting(self) -> dict[int, PendingOperation]:
        """Where each member's main thread waits."""
        return {rank: entry for entry in self._open() for rank in entry.places}

    def _stand_still(self) -> bool:
        """Whether every member's main thread waits, and for another one."""
        waiting = self._waiting()
        return self._size > 1 and all(rank in waiting for rank in range(self._size) if rank not in self._gone)

    def _end_standstill(self) -> list[Answer]:
        self._still_since = math.inf
        waiting = self._waiting()
        places = "; ".join(
            f"{self._noun} {rank} in '{waiting[rank].name}' at {waiting[rank].places[rank]}" for rank in sorted(waiting)
        )
        failure = (
            f"Every {self._noun} must make the same calls, in the same order. Received: each waits for another one: {places}. "
            f"Leave out conditions on the {self._noun} around them."
        )
        entries = {id(entry): entry for entry in waiting.values()}.values()
        return [answer for entry in entries for answer in entry.fail(failure, is_misuse=True)]

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

    def _open(self) -> Iterable[PendingOperation]:
        return [entry for rounds in self._rounds.values() for entry in rounds if not entry.failure]

    def _missing(self, entry: PendingOperation) -> list[int]:
        return [rank for rank in range(self._size) if rank not in entry.tickets]

    def _outcome(self, entry: PendingOperation) -> list[Answer]:
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


def _failed(ticket: int, failure: str, is_misuse: bool = False) -> Message:
    return {"type": "failed", "ticket": ticket, "failure": failure, "misuse": is_misuse}
