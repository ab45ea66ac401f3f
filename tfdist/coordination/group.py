"""The interface `Group`: communication between the processes of a job, outside of TensorFlow graphs."""

import abc
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from tfdist.errors import InputError, PeerLostError, Preempted, error_summary, one_line

NO_GOODBYE = "its connection closed without a goodbye (it was killed, crashed, or exited silently)"
LAUNCHER = -1  # rank of a launcher that serves a group

Json = Any  # None, bool, int, float, str, and lists and string-keyed dicts of them
Listener = Callable[[Json], object]  # returns True to unsubscribe


@dataclasses.dataclass(frozen=True)
class LostMember:
    """The loss of a member.

    Attributes:
      rank: the member's rank; `LAUNCHER` for a launcher that serves the group.
      reason: a clause such as "its connection closed without a goodbye".
      code: the exit code that the member sent when it left; None if it disappeared.
      noun: name of a member in messages.
    """

    rank: int
    reason: str
    code: int | None = None
    noun: str = "rank"

    def __str__(self) -> str:
        return f"{name_member(self.rank, self.noun)} is lost: {self.reason}"


class Difference(NamedTuple):
    """An entry that differs between members of a group.

    Attributes:
      key: its key.
      ranks: the ranks that have each value; values are JSON, or "nothing" for a missing entry.
    """

    key: str
    ranks: dict[str, list[int]]


class Group(abc.ABC):
    """A group of all processes of a job, or of some of them (`subgroup`), as seen by one of its members.

    Every operation except `publish` is collective: all members must call it with the same name. Operations with different
    names may be called in any order and from any thread. A name may be reused after its previous operation has completed.
    The outcome is the same on all members: if the operation is not complete when the shortest `deadline` (in seconds) of
    the waiting members has passed, or if a member is lost or leaves, it raises `PeerLostError` on every member, with the
    names of the missing members.

    Members are numbered from 0. Error messages give their ranks in the job.

    Attributes:
      rank: this process's rank among the members, in [0, size).
      size: number of members.
      roles: roles of members by rank in the job, for messages, such as "stage 1" of a pipeline.
      describe_wait: returns what this process waits for outside of the group, for reports of stalls; "" if for nothing.
    """

    rank: int
    size: int
    roles: Mapping[int, str] = MappingProxyType({})
    describe_wait: Callable[[], str] = staticmethod(lambda: "")

    @property
    def ranks(self) -> Sequence[int]:
        """The members' ranks in the job, in increasing order."""
        return range(self.size)

    @property
    def goodbye_code(self) -> int | None:
        """Exit code with which this process has left the job; None before that."""
        return None

    def role(self, rank: int) -> str:
        """Returns a suffix with the role of a rank of the job, such as ` (stage 1)`; empty if it has none."""
        return f" ({self.roles[rank]})" if rank in self.roles else ""

    @abc.abstractmethod
    def gather(self, name: str, value: Json, deadline: float = 60.0) -> list[Json]:
        """Returns every member's value, ordered by rank, on every member.

        Args:
          name: name of the operation, the same on every member.
          value: at most 1 MiB as JSON; tuples arrive as lists.
          deadline: seconds to wait, from the arrival of this member's value.

        Raises:
          PeerLostError: a member did not call in time, or is lost.
          InputError: the value is too large.
        """

    def barrier(self, name: str, deadline: float = 60.0) -> None:
        """Waits until every member has called this method."""
        self.gather(name, None, deadline)

    def broadcast(self, name: str, value: Json, deadline: float = 60.0, root: int = 0) -> Json:
        """Returns the root's value on every member; other values are ignored."""
        return self.gather(name, value if self.rank == root else None, deadline)[root]

    def all_equal(self, name: str, value: Json, deadline: float = 60.0) -> bool:
        """Returns whether all members pass the same value, of any size; only a digest is sent."""
        return len({*self.gather(name, _digest(value), deadline)} - {None}) == 1

    def difference(
        self,
        name: str,
        entries: Mapping[str, Json],
        deadline: float = 60.0,
        *,
        ignore_missing: bool = False,
        members: Sequence[int] = (),
    ) -> Difference | None:
        """Returns the first entry that differs between members, in the order of the first member; None if all are equal.

        Only a digest is sent if there is no difference.

        Args:
          name: name of the operation, the same on every member.
          entries: entries by key; their keys must fit into a message if they differ.
          deadline: seconds to wait.
          ignore_missing: whether to ignore entries that are missing on a member.
          members: the members to compare, in the order in which messages list them; by default all.
        """
        compared_members = members or range(self.size)
        digests = {key: _digest(value) for key, value in entries.items()} if self.rank in compared_members else {}
        all_digests = self.gather(name, _digest([*digests.items()]), deadline)
        if len({all_digests[member] for member in compared_members} - {None}) == 1:
            return None
        gathered_digests = self.gather(f"{name}/digests", digests, deadline)
        first, *others = (d for member in compared_members if (d := gathered_digests[member]) is not None)

        def is_different(key: str) -> bool:
            return any(
                key in first and key in other and first[key] != other[key]
                if ignore_missing
                else first.get(key) != other.get(key)
                for other in others
            )

        key = next(filter(is_different, dict.fromkeys(itertools.chain(first, *others))), None)
        if key is None:
            return None
        values = self.gather(f"{name}/values", {key: entries[key]} if key in entries else {}, deadline)
        ranks: dict[str, list[int]] = {}
        for member in compared_members:
            if values[member] is None:  # it is lost
                continue
            text = json.dumps(values[member][key], sort_keys=True) if values[member] else "nothing"
            ranks.setdefault(text, []).append(self.ranks[member])
        return Difference(key, ranks)

    def agree(
        self,
        name: str,
        entries: Mapping[str, Json],
        prefix: str = "",
        deadline: float = 60.0,
        *,
        ignore_missing: bool = False,
    ) -> None:
        """Checks that all members pass the same entries.

        Args:
          name: name of the operation, the same on every member.
          entries: values that must be equal, by key: flags, versions.
          prefix: prefix of a key in the message: "flag --" turns the key `seed` into "flag --seed differs: ...".
          deadline: seconds to wait.
          ignore_missing: whether to ignore entries that are missing on a member.

        Raises:
          InputError: on every member, with the first key that differs and the ranks of each value.
        """
        if difference := self.difference(name, entries, deadline, ignore_missing=ignore_missing):
            values = ", ".join(
                f"{name_ranks(ranks)} {'have' if len(ranks) > 1 else 'has'} {value}"
                for value, ranks in difference.ranks.items()
            )
            raise InputError(f"{prefix}{difference.key} differs: {values}. It must be the same on every process.")

    @abc.abstractmethod
    def publish(self, topic: str, value: Json) -> None:
        """Publishes a value to every member, including this one, without waiting.

        May be called on any member and from any thread. All members receive all values in the same order. Values sent after
        the group has ended are lost.

        Args:
          topic: topic of the value, see `subscribe`.
          value: at most 1 MiB as JSON; tuples arrive as lists.

        Raises:
          InputError: the value is too large.
        """

    @abc.abstractmethod
    def subscribe(self, topic: str, callback: Listener) -> None:
        """Subscribes to a topic.

        The callback receives every value of the topic, including values published before this call, one at a time and in
        the order of publication. All topics share one thread, so a callback must return quickly and must not wait for
        another rank. If a callback returns True, it is unsubscribed, and later values go to the next callback of the topic.

        Args:
          topic: topic to subscribe to.
          callback: called with each value.
        """

    @abc.abstractmethod
    def on_loss(self, callback: Callable[[LostMember], None]) -> None:
        """Registers a callback that is called once, from another thread, with the first loss.

        The callback is called immediately if a member is already lost. The loss of the process that serves the job's group is
        a loss in every subgroup.
        """

    def first_loss(self, wait: float = 0.0) -> LostMember | None:
        """Returns the first loss, as reported by `on_loss`, or None.

        Args:
          wait: seconds to wait for the notice of a loss, which may arrive after an engine's error.
        """
        return None

    def tolerate_lost_members(self, ranks: Iterable[int]) -> None:
        """Lets the job continue without these members if they are lost from now on; this process's own rank is ignored.

        Operations then complete with None as the lost member's value, and `on_loss` and `first_loss` do not report the loss.
        The lost member itself cannot continue. Operations that all members have already begun may return its value or None.

        Args:
          ranks: members of this group; a single call on any other member is enough.
        """

    def on_departure(self, callback: Callable[[LostMember], None]) -> None:
        """Registers a callback that is called, from another thread, with every tolerated loss from now on."""

    @property
    def departed_members(self) -> frozenset[int]:
        """The lost members whose losses are tolerated and known to this process."""
        return frozenset()

    @abc.abstractmethod
    def token_for(self, purpose: str) -> str:
        """Returns a token for another connection between processes of the job, without transmitting it.

        Other jobs, and other runs of the same job, have different tokens, even with the same secret.

        Args:
          purpose: the same in all processes of the connection; not secret.
        """

    @abc.abstractmethod
    def subgroup(self, ranks: Sequence[int]) -> "Group":
        """Returns a group of some members, without communication.

        Its operations and topics involve its members only; other groups may use the same names. The loss of another process
        does not affect them. Subgroups with the same members are the same group.

        Args:
          ranks: ranks in this group, in any order, including this process's.

        Raises:
          ValueError: `ranks` are not distinct ranks of this group, or do not include this process's.
        """

    @abc.abstractmethod
    def leave(self, code: int = 0, reason: str = "") -> None:
        """Leaves the job: this group, the group that it is a subgroup of, and all other subgroups.

        A member that leaves with code 0 or 75 (preempted) does not count as lost. Any other code is reported to the other
        members as a loss.

        Args:
          code: exit code of this process.
          reason: description for the other members.
        """


def subgroup_members(group: Group, ranks: Iterable[int]) -> list[int]:
    """Returns the sorted members of a subgroup, after validating them; see `Group.subgroup`."""
    rank_list = list(ranks)
    sorted_ranks = sorted({*rank_list} & {*range(group.size)})
    if len(sorted_ranks) < len(rank_list) or group.rank not in sorted_ranks:
        raise ValueError(
            f"The ranks of a subgroup must be distinct, in [0, {group.size}), and include this process's own. Received: "
            f"{rank_list} on {name_member(group.rank)}."
        )
    return sorted_ranks


def name_member(rank: int, noun: str = "rank") -> str:
    """Returns `rank 2`, or `the launcher`."""
    return "the launcher" if rank == LAUNCHER else f"{noun} {rank}"


def name_ranks(ranks: list[int], noun: str = "rank") -> str:
    """Returns `rank 2` or `ranks 2, 5`."""
    return f"{noun}{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _digest(value: Json) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:32]


def silence_reason(seconds: float) -> str:
    """Returns the reason for a loss that was detected by missing heartbeats."""
    return f"no heartbeat for {seconds:g} s (it is stopped, or its host is unreachable)"


LONG_SECONDS = 3600.0  # for operations during which a rank may read or write large files, or compile
WARNING_SECONDS = 60.0

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def long_timeout(activity: str) -> Iterator[float]:
    """Yields the deadline in seconds for a `Group` operation in the body, and logs a warning if it takes long.

    The deadline limits only the time to wait for live members: lost members are detected immediately.

    Args:
      activity: what may keep the other ranks busy, for the warning, such as "its data".
    """
    timer = threading.Timer(
        WARNING_SECONDS,
        _log.warning,
        (
            "Other ranks have not arrived for %g s: one may be busy with %s. This rank waits up to %g s. Send SIGUSR1 "
            "to a rank to print its stack.",
            WARNING_SECONDS,
            activity,
            LONG_SECONDS,
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield LONG_SECONDS
    finally:
        timer.cancel()


_MAX_ERROR_LENGTH = 1000  # characters


@contextlib.contextmanager
def raise_on_all_members(group: Group, name: str) -> Iterator[None]:
    """Context manager that raises on all members of a group if its body raises on any; every member must enter it.

    Processes with different parts of a model may reject different inputs. The body must not wait for other members, because
    their bodies may already have raised an error.

    Raises:
      InputError: another member has raised `InputError`, `ValueError` or `TypeError`.
      PeerLostError: another member has raised any other error.
    """

    def gather(error: Json) -> list[Json]:
        with long_timeout("its part of the model") as deadline:
            return group.gather(f"refused/{name}", error, deadline)

    try:
        yield
    except (PeerLostError, Preempted):  # detected by the other members
        raise
    except Exception as error:
        if isinstance(error, InputError):
            fields = ["InputError", one_line(str(error))[:_MAX_ERROR_LENGTH]]
        else:
            fields = ["ValueError" if isinstance(error, ValueError | TypeError) else "Exception", error_summary(error)]
        with contextlib.suppress(PeerLostError):
            gather(fields)
        raise
    for rank, failure in zip(group.ranks, gather(None), strict=True):
        if not failure:
            continue
        kind, text = failure
        member_name = f"{name_member(rank)}{group.role(rank)}"
        if kind == "InputError":
            raise InputError(text)
        if kind == "ValueError":
            raise InputError(
                f"Every process must accept its part of the model. Received on {member_name}: {text.rstrip('.')}. Change the "
                "model or the data."
            )
        raise PeerLostError(f"{member_name} has failed: {text}")
