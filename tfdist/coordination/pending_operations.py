"""State of the pending gathers, without sockets, threads or clocks."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from tfdist.coordination.group import Json, name_ranks
from tfdist.coordination.messages import BadMessage, Message

MOST_PENDING = 10_000  # operations, far more than programs have
STANDSTILL_SECONDS = 10.0  # how long members must wait for each other before this is an error
REPORTED_SECONDS = 20.0  # after which a waiting member is notified of the missing members


class Answer(NamedTuple):
    """A message for a member."""

    rank: int
    message: Message


@dataclasses.dataclass(eq=False)
class PendingOperation:
    """One use of a name: who has arrived, and the failure if there was one.

    Attributes:
      name: name of the operation.
      ranks: the members that it waits for.
      tickets: by rank, the id under which the member knows its request.
      values: by rank.
      deadline: the shortest deadline of the waiting members, in seconds.
      expires: the time at which that deadline is over.
      failure: why it failed, for members that arrive later; empty while it is open.
      places: by rank, where in its program the member waits; only for members whose main thread does.
      began: when the first member arrived.
      is_reported: whether the waiting members have been notified of the missing ones.
      is_misuse: whether it failed because the programs of the ranks make different calls.
      stuck_since: since when it is known to be stuck, see `_stuck`; inf if it is not.
    """

    name: str
    ranks: Sequence[int]
    tickets: dict[int, int] = dataclasses.field(default_factory=dict)
    values: dict[int, Json] = dataclasses.field(default_factory=dict)
    deadline: float = math.inf
    expires: float = math.inf
    failure: str = ""
    places: dict[int, str] = dataclasses.field(default_factory=dict)
    began: float = math.inf
    is_reported: bool = False
    is_misuse: bool = False
    stuck_since: float = math.inf

    def missing(self) -> list[int]:
        """Returns the members that have not arrived."""
        return [rank for rank in self.ranks if rank not in self.tickets]

    def fail(self, failure: str, is_misuse: bool = False) -> Iterator[Answer]:
        """Fails the operation for all waiting members; those that arrive later get the same outcome."""
        self.failure, self.expires, self.is_misuse = failure, math.inf, is_misuse
        for rank, ticket in self.tickets.items():
            yield Answer(rank, _failed(ticket, failure, is_misuse))
        self.values.clear()


class PendingOperations:
    """All pending operations of a job's group and its subgroups.

    A member's value goes to the oldest pending operation of these ranks and that name at which the member has not
    arrived yet.
    """

    def __init__(self, size: int, noun: str = "rank", absence: Callable[[list[int]], str] = lambda missing: ""):
        """Initializes without pending operations.

        Args:
          size: number of members of the job.
          noun: what a member is called in messages.
          absence: returns additional text about missing members.
        """
        self._size = size
        self._noun = noun
        self._absence = absence
        self._rounds: dict[tuple[Sequence[int], str], list[PendingOperation]] = {}
        self._gone: dict[int, str] = {}  # why members can arrive nowhere any more, in the order of their ends
        self._misuse = ""  # why some members will never join

    def add(
        self,
        rank: int,
        ticket: int,
        name: str,
        value: Json,
        deadline: float,
        now: float,
        place: str = "",
        ranks: Sequence[int] | None = None,
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
          ranks: the members that the operation waits for, in order; None for all.
        """
        key = (range(self._size) if ranks is None else ranks, name)
        rounds = self._rounds.setdefault(key, [])
        entry = next((one for one in rounds if rank not in one.tickets), None)
        if entry is None:
            if sum(map(len, self._rounds.values())) >= MOST_PENDING:
                raise BadMessage(f"a gather while {MOST_PENDING} are pending")
            rounds.append(entry := PendingOperation(name, key[0]))
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
        if len(entry.tickets) == len(entry.ranks):
            rounds.remove(entry)
        if not rounds:
            del self._rounds[key]
        self._note_stuck(now)
        return answers

    def expire(self, now: float) -> list[Answer]:
        """Fails the operations whose deadline is over, and those that wait for each other."""
        answers: list[Answer] = []
        for entry in self._open():
            if entry.expires <= now:
                missing = entry.missing()
                names = name_ranks(missing, self._noun)
                failure = f"{names} did not reach '{entry.name}' within {entry.deadline:g} s{self._absence(missing)}."
                answers += entry.fail(failure)
        self._note_stuck(now)
        stuck = [entry for entry in self._open() if entry.stuck_since + STANDSTILL_SECONDS <= now]
        return answers + (self._end_standstill(stuck) if stuck else [])

    def late(self, now: float) -> list[Answer]:
        """Returns, once per operation, messages that notify long-waiting members of the missing ones."""
        found = [one for one in self._open() if not one.is_reported and one.began + REPORTED_SECONDS <= now]
        answers = []
        for entry in found:
            entry.is_reported = True
            missing = name_ranks(entry.missing(), self._noun)
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

    def _note_stuck(self, now: float) -> None:
        stuck = self._stuck()
        for entry in self._open():
            entry.stuck_since = min(entry.stuck_since, now) if entry in stuck else math.inf

    def _stuck(self) -> Sequence[PendingOperation]:
        """Returns the operations that wait for each other in a cycle, or for operations in a cycle.

        One such operation waits for a member whose main thread waits in another one. Other threads of that member are
        not known to be stuck.
        """
        waiting = self._waiting()
        stuck: Sequence[PendingOperation] = list(dict.fromkeys(waiting.values()))
        while True:
            still = [entry for entry in stuck if any(waiting.get(rank) in stuck for rank in entry.missing())]
            if len(still) == len(stuck):
                return stuck
            stuck = still

    def _end_standstill(self, stuck: Sequence[PendingOperation]) -> list[Answer]:
        where = {rank: (entry, place) for entry in stuck for rank, place in entry.places.items()}
        places = "; ".join(
            f"{self._noun} {rank} in '{entry.name}'{self._among(entry)} at {place}"
            for rank, (entry, place) in sorted(where.items())
        )
        failure = (
            f"Every {self._noun} must make the same calls, in the same order. Received: each waits for another one: "
            f"{places}. Do not make them conditional on the {self._noun}."
        )
        return [answer for entry in stuck for answer in entry.fail(failure, is_misuse=True)]

    def _among(self, entry: PendingOperation) -> str:
        is_of_all = len(entry.ranks) == self._size
        return "" if is_of_all else f" of {name_ranks(list(entry.ranks), self._noun)}"

    def fail_all(self, misuse: str) -> list[Answer]:
        """Fails all operations, and later ones, as the job was started such that some members will never join."""
        self._misuse = misuse
        return [answer for entry in self._open() for answer in self._outcome(entry)]

    def member_left(self, rank: int, how: str) -> list[Answer]:
        """Records that a member left without an error, and fails the operations that still need it."""
        self._gone[rank] = f"{self._noun} {rank} {how}"
        return [answer for entry in self._open() for answer in self._outcome(entry)]

    def member_lost(self, rank: int, loss: str) -> list[Answer]:
        """Records the loss of a member, and fails its operations: those of a subgroup without it continue."""
        self._gone[rank] = loss
        pending = [entry for entry in self._open() if rank in entry.ranks]
        return [a for entry in pending for a in entry.fail(f"'{entry.name}' cannot complete: {loss}.")]

    def _open(self) -> Iterable[PendingOperation]:
        return [entry for rounds in self._rounds.values() for entry in rounds if not entry.failure]

    def _outcome(self, entry: PendingOperation) -> list[Answer]:
        missing = entry.missing()
        if not missing:
            values = [entry.values[rank] for rank in entry.ranks]
            return [
                Answer(rank, {"type": "values", "ticket": ticket, "values": values})
                for rank, ticket in entry.tickets.items()
            ]
        if self._misuse:
            return list(entry.fail(self._misuse, is_misuse=True))
        gone = next((how for rank, how in self._gone.items() if rank in missing), "")
        return list(entry.fail(f"'{entry.name}' cannot complete: {gone}.")) if gone else []


def _failed(ticket: int, failure: str, is_misuse: bool = False) -> Message:
    return {"type": "failed", "ticket": ticket, "failure": failure, "misuse": is_misuse}
