"""State of the pending gathers, without sockets, threads or clocks."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tfdist.coordination.group import Json, name_ranks
from tfdist.coordination.messages import Message

STANDSTILL_SECONDS = 10.0  # how long all members must wait for each other before this is an error
REPORTED_SECONDS = 20.0  # after which a waiting member is told whom it waits for


class Answer(NamedTuple):
    """A message for a member."""

    rank: int
    message: Message


@dataclasses.dataclass
class PendingOperation:
    """One use of a name: who has arrived, and the failure if there was one.

    Attributes:
      name: name of the operation.
      tickets: by rank, the id under which the member knows its request.
      values: by rank.
      deadline: the shortest deadline of the waiting members, in seconds.
      expires: the time at which that deadline is over.
      failure: why it failed, for members that arrive later; empty while it is open.
      places: by rank, where in its program the member waits; only for members whose main thread does.
      began: when the first member arrived.
      is_reported: whether the waiting members have been told whom they wait for.
      is_misuse: whether it failed because the programs of the ranks make different calls.
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
        """Fails the operation for all waiting members; those that arrive later get the same outcome."""
        self.failure, self.expires, self.is_misuse = failure, math.inf, is_misuse
        for rank, ticket in self.tickets.items():
            yield Answer(rank, _failed(ticket, failure, is_misuse))
        self.values.clear()


class PendingOperations:
    """All pending operations of a group.

    A member's value goes to the oldest pending operation of that name at which the member has not arrived yet.
    """

    def __init__(self, size: int, noun: str = "rank", absence: Callable[[list[int]], str] = lambda missing: ""):
        """Initializes without pending operations.

        Args:
          size: number of members of the group.
          noun: what a member is called in messages.
          absence: returns additional text about missing members.
        """
        self._size = size
        self._noun = noun
        self._absence = absence
        self._rounds: dict[str, list[PendingOperation]] = {}
        self._gone: dict[int, str] = {}
        self._broken = ""
        self._still_since = math.inf  # when the last member arrived, if all wait and nobody else can arrive

    def arrive(
        self, rank: int, ticket: int, name: str, value: Json, deadline: float, now: float, place: str = ""
    ) -> list[Answer]:
        """Records a member's value and returns the messages to send.

        Args:
          rank: rank of the member.
          ticket: id under which the member knows its request.
          name: name of the operation.
          value: the member's value.
          deadline: seconds that the member waits.
          now: current time.
          place: where in its program the member's main thread waits; empty if another thread does.
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
        """Fails the operations whose deadline is over, and deadlocks."""
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
        """Returns, once per operation, messages that tell long-waiting members whom they wait for."""
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
        """Returns when the next deadline is over."""
        return min((entry.expires for entry in self._open()), default=math.inf)

    def _waiting(self) -> dict[int, PendingOperation]:
        """Returns, by rank, the operation in which the member's main thread waits."""
        return {rank: entry for entry in self._open() for rank in entry.places}

    def _stand_still(self) -> bool:
        """Returns whether the main threads of all remaining members are waiting for another member."""
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
        """Records that a member left without an error, and fails the operations that need it."""
        self._gone[rank] = how
        return [answer for entry in self._open() for answer in self._outcome(entry)]

    def break_off(self, reason: str) -> list[Answer]:
        """Fails all pending and future operations."""
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
